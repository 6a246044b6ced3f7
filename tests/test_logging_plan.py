"""The command that groups machines: what it prints, what it draws, what it refuses."""

from __future__ import annotations

import json
import math

import pytest

from regrow.cli import main
from regrow.sizes import parse_bytes, show_bytes

PROFILE = {
    "replay_s": [1.0, 1.0, 2.0, 1.0],
    "boundary_bytes": [5e9, 1e9, 5e9],
    "bandwidth": 1e9,
    "checkpoint_every": 10,
    "ranks_per_machine": 2,
}


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


def test_prints_the_plan_and_the_frontier(profile, capsys):
    assert main(["plan", "logging", str(profile), "--cap", "10GB"]) == 0
    said = capsys.readouterr().out
    assert "4 machines, a checkpoint every 10 steps, journals of at most 10.00 GB" in said
    assert "--failure-domain 0-3,4-7" in said
    assert "0-1 | 2-3" in said and "0 | 1 | 2 | 3" in said and "0-3" in said
    assert "greedy" in said


def test_draws_the_frontier(profile, tmp_path, capsys):
    picture = tmp_path / "frontier.png"
    assert main(["plan", "logging", str(profile), "--cap", "10GB", "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 5000
    assert f"drawn to {picture}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "cap", "why"),
    [
        ({"replay_s": [1.0]}, "1GB", "1 machines have 0 boundaries"),
        ({"bandwidth": "fast"}, "1GB", "could not convert"),
        ({"extra": 1}, "1GB", "extra is unknown"),
        ({}, "much", "is no size"),
        (
            {"checkpoint_every": math.inf},
            "1GB",
            "checkpoint_every must be a whole number from 1 to 1000000000000, not inf",
        ),
        ({"checkpoint_every": math.nan}, "1GB", "checkpoint_every must be a whole number"),
        ({"checkpoint_every": 10**400}, "1GB", "checkpoint_every: int too large"),
        ({"checkpoint_every": 2.5}, "1GB", "not 2.5"),
        ({"checkpoint_every": None}, "1GB", "checkpoint_every: float() argument must be"),
        ({"ranks_per_machine": 0}, "1GB", "ranks_per_machine must be a whole number from 1"),
        ({"replay_s": "1231"}, "1GB", "replay_s must be a list of numbers, not '1231'"),
        ({"boundary_bytes": {"1": 2}}, "1GB", "boundary_bytes must be a list of numbers"),
    ],
)
def test_one_sentence_for_what_is_wrong(profile, capsys, change, cap, why):
    profile.write_text(json.dumps({**PROFILE, **change}))
    assert main(["plan", "logging", str(profile), "--cap", cap]) == 2
    said = capsys.readouterr().err
    assert why in said and "Traceback" not in said


def test_a_profile_that_is_none(tmp_path, capsys):
    assert main(["plan", "logging", str(tmp_path / "nowhere.json"), "--cap", "1GB"]) == 2
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "half.json").write_text('{"replay_s": [1.0]}')
    assert main(["plan", "logging", str(tmp_path / "half.json"), "--cap", "1GB"]) == 2
    assert "bandwidth is missing" in capsys.readouterr().err
    (tmp_path / "no.json").write_text("no")
    assert main(["plan", "logging", str(tmp_path / "no.json"), "--cap", "1GB"]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_profile_without_end(profile, capsys):
    profile.write_text("[" * 100_000)
    assert main(["plan", "logging", str(profile), "--cap", "1GB"]) == 2
    assert "nested too deeply" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("1e9", 1e9), ("200GB", 2e11), ("1.5 T", 1.5e12), ("3kb", 3000), ("2M", 2e6)]
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(("size", "text"), [(7, "7 B"), (1500, "1.50 kB"), (2e11, "200.00 GB"), (3e15, "3000.00 TB")])
def test_sizes_as_they_are_shown(size, text):
    assert show_bytes(size) == text
