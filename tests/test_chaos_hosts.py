"""Hosts that are cut off at random, a few times (``make chaos-hosts``: many times), and the judge of what they did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import histories
from histories import Fact

CHAOS = Path(__file__).parent.parent / "bench" / "chaos_hosts.py"


def held(rank, pid, incarnation, generation, *times):
    """The facts of one holder: a step is begun, and done, at each pair of times."""
    kinds = ("begun", "done")
    return [Fact(t, rank, incarnation, generation, pid, n // 2, kinds[n % 2]) for n, t in enumerate(times)]


GOOD = [
    *held(0, 10, 0, 0, 1, 2, 3, 4),
    *held(0, 10, 0, 1, 9, 10, 11, 12),
    *held(1, 11, 0, 0, 1, 2, 3),
    *held(1, 12, 1, 1, 9, 10, 11, 12),
]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], []),
        (held(1, 11, 0, 0, 9.5), ["process 12 (incarnation 1) held it from 9.000 s on", "came after generation 1"]),
        (held(1, 13, 2, 2, 11.5), ["process 13 (incarnation 2) held it from 11.500 s on, process 12"]),
        (held(1, 13, 1, 2, 13), ["incarnation 1 had 2 holders: process 12 (incarnation 1), process 13"]),
        (held(1, 13, 2, 1, 13), ["generation 1 had 2 holders: process 12 (incarnation 1), process 13 (incarnation 2)"]),
        (held(0, 10, 0, 0, 13), ["generation 0 (process 10, 13.000 s) came after generation 1"]),
        (held(0, 13, 1, 2, 3.5, 3.6), ["process 13 (incarnation 1) held it from 3.500 s on, process 10"]),
    ],
)
def test_two_holders_of_a_rank_are_found(more, words):
    found = histories.faults([*more, *GOOD])
    assert bool(found) == bool(words)
    for word in words:
        assert any(word in fault for fault in found), found


def test_a_generation_that_two_have_begun_is_found():
    told = [
        {"event": name, key: n, "node": n}
        for name, key in (("generation", "generation"), ("leader", "epoch"))
        for n in (1, 2)
    ]
    assert histories.told_twice(told) == []
    assert histories.told_twice([*told, {"event": "leader", "epoch": 2, "node": 7}]) == [
        "epoch 2 was begun by node 2 and by node 7"
    ]


def test_torn_lines_are_left_out(tmp_path):
    line = '{"rank": 0, "incarnation": 0, "pid": 1, "generation": 2, "step": 3, "what": "done", "t": 4.5}'
    (tmp_path / "history.1.jsonl").write_text(f"{line}\n{line[:20]}")
    assert histories.read(tmp_path) == [Fact(4.5, 0, 0, 2, 1, 3, "done")]


if os.environ.get("REGROW_TEST_ALL"):  # five hosts start in half a minute: `make test-all`

    @pytest.mark.timeout(220)
    def test_random_cuts_change_nothing():
        command = [sys.executable, str(CHAOS), "--cuts", "3", "--deadline", "60"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            output, _ = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its hosts
            output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
        if output.startswith("skipped: "):
            pytest.skip(output)
        assert "no rank ever had two holders" in output and "identical to the undisturbed run: yes" in output
