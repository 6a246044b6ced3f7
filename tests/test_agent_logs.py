"""Where output goes: files, the console, both, or nowhere."""

import io
import os
from pathlib import Path

import pytest

from regrow.agent.logs import Logs, Tail
from regrow.agent.options import RunOptions


def logs(tmp_path, **given):
    return Logs(RunOptions(command=("true",), token="t", log_dir=tmp_path, nproc=2, **given), "run7")


def test_nothing_asked_for(tmp_path):
    paths = logs(tmp_path).paths(1, 0)
    assert (paths.stdout, paths.stderr) == ("", "")
    assert paths.error_file.startswith(str(tmp_path / "run7_")) and paths.error_file.endswith("/attempt_0/1/error.json")


def test_some_ranks_streams_go_to_files(tmp_path):
    made = logs(tmp_path, redirects="0:1,1:3")
    first, second, again = made.paths(0, 0), made.paths(1, 0), made.paths(0, 1)
    assert first.stdout.endswith("/attempt_0/0/stdout.log") and first.stderr == ""
    assert second.stdout.endswith("/attempt_0/1/stdout.log") and second.stderr.endswith("/attempt_0/1/stderr.log")
    assert again.stdout.endswith("/attempt_1/0/stdout.log")
    assert len(list(tmp_path.iterdir())) == 1


def test_other_ranks_are_not_shown(tmp_path, capsys):
    made = logs(tmp_path, tee="3", redirects="0", local_ranks=frozenset({0}))
    shown, hidden = made.paths(0, 0), made.paths(1, 0)
    for paths in (shown, hidden):
        Path(paths.stdout).write_text("a line\n")
    made.stop()
    assert capsys.readouterr().out == "[default0]:a line\n"
    assert logs(tmp_path, local_ranks=frozenset({0})).paths(1, 0).stdout == os.devnull


def test_a_tail_copies_whole_lines_and_what_is_left(tmp_path):
    path, to = tmp_path / "stdout.log", io.StringIO()
    path.touch()
    tail = Tail(path, "[w0]:", to)
    with path.open("w") as file:
        for part in ("one\ntw", "o\n", "\n", "three"):
            file.write(part)
            file.flush()
    tail.stop()
    assert to.getvalue() == "[w0]:one\n[w0]:two\n[w0]:\n[w0]:three\n"


@pytest.mark.parametrize("tee", ["1", "0:1"])
def test_a_lost_ranks_last_words_are_shown(tmp_path, capsys, tee):
    made = logs(tmp_path, tee=tee)
    paths = made.paths(0, 3)
    Path(paths.stdout).write_bytes(b"\xff and no end of line")
    made.retire(paths)
    assert capsys.readouterr().out == "[default0]:� and no end of line\n"
    made.stop()
