"""Injected faults are real ones, strike where they are told to, and no more often than they are told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow import testing
from regrow.testing import ACTIONS, EXIT_STATUS, MEANINGS, POINTS, Fault, InjectedFault, Injector, decode, encode

faults = st.builds(
    Fault,
    point=st.sampled_from(POINTS),
    rank=st.integers(0, 99),
    step=st.none() | st.integers(0, 10**9),
    nth=st.integers(1, 9),
    action=st.sampled_from(sorted(ACTIONS)),
    times=st.integers(1, 9),
)


def test_points_are_the_promised_ones() -> None:
    assert POINTS == (
        "before_forward", "in_backward", "between_updates", "after_update", "before_transfer", "after_transfer",
        "replacement_setup", "step_end", "rejoin", "helping",
        "checkpoint_write", "checkpoint_written", "checkpoint_commit",
        "disk_copy", "disk_write", "disk_written", "disk_rename", "disk_mark", "disk_commit",
        "snapshot_copy", "snapshot_taken", "snapshot_send",
    )  # fmt: skip
    assert all(MEANINGS.values())


@given(st.lists(faults, max_size=5))
def test_text_round_trip(given: list[Fault]) -> None:
    assert decode(encode(given)) == given


def test_human_form() -> None:
    assert decode("kill rank=2 step=5 point=in_backward;  stop   point=rejoin rank=0 times=3 ;") == [
        Fault(action="kill", rank=2, step=5, point="in_backward"),
        Fault(action="stop", rank=0, point="rejoin", times=3),
    ]
    assert encode([Fault(rank=2, step=5, point="in_backward")]) == "kill rank=2 step=5 point=in_backward"
    assert decode("") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("kill rank=2", "point= is missing"),
        ("kill point=rejoin", "rank= is missing"),
        ("kill rank=two point=rejoin", "rank=two in .*number"),
        ("kill rank=2 point=nowhere", "no point is named 'nowhere'.*before_forward"),
        ("maim rank=2 point=rejoin", "no action is named 'maim'.*kill"),
        ("kill rank=2 point=rejoin when=now", "'when=now'"),
        ("kill rank=2 rank=3 point=rejoin", "stands twice"),
        ("kill rank=-1 point=rejoin", "rank=-1: at least 0"),
        ("kill rank=1 point=rejoin nth=0", "nth=0: at least 1"),
        ("kill rank=1 point=rejoin times=0", "times=0: at least 1"),
        ("kill rank=1 point=rejoin step=-2", "step=-2"),
    ],
)
def test_wrong_text_is_explained(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        decode(text)


def struck(injector: Injector, name: str, step: int | None) -> bool:
    try:
        injector.point(name, step)
    except InjectedFault:
        return True
    return False


def test_rank_step_point_and_nth_must_all_be_right(tmp_path: Path) -> None:
    fault = Fault(action="raise", rank=1, step=3, point="in_backward", nth=2)
    other = Injector([fault], rank=0, marks_dir=tmp_path)
    assert not other.armed
    assert not struck(other, "in_backward", 3)
    injector = Injector([fault], rank=1, marks_dir=tmp_path)
    passes = [("in_backward", 2), ("step_end", 3), ("in_backward", 3), ("in_backward", None), ("in_backward", 3)]
    assert [struck(injector, *passed) for passed in passes] == [False, False, False, False, True]
    assert not struck(injector, "in_backward", 3)


def test_times_count_over_incarnations(tmp_path: Path) -> None:
    plan = [Fault(action="raise", rank=0, point="rejoin", times=3), Fault(action="raise", rank=0, point="rejoin")]
    hits = 0
    for _ in range(8):
        injector = Injector(plan, rank=0, marks_dir=tmp_path / "marks")
        hits += struck(injector, "rejoin", None)
        hits += struck(injector, "rejoin", 5)
    assert hits == 4


def test_an_unknown_point_in_the_library_is_a_mistake(tmp_path: Path) -> None:
    injector = Injector([Fault(rank=0, point="rejoin")], rank=0, marks_dir=tmp_path)
    with pytest.raises(ValueError, match="no point is named 'rejoyn'"):
        injector.point("rejoyn")


def test_install(tmp_path: Path) -> None:
    testing.point("rejoin")
    fault = Fault(action="raise", rank=0, point="rejoin", step=1)
    testing.install(Injector([fault], rank=0, marks_dir=tmp_path))
    try:
        testing.point("rejoin", 0)
        with pytest.raises(InjectedFault, match="raise rank=0 step=1 point=rejoin"):
            testing.point("rejoin", 1)
        testing.install(Injector([fault], rank=1, marks_dir=tmp_path))
        assert testing._installed is None
    finally:
        testing.install(None)


_VICTIM = """
import sys, threading
from pathlib import Path
from regrow.testing import Injector, decode, install, point
install(Injector(decode(sys.argv[1]), rank=1, marks_dir=Path(sys.argv[2])))
print("ready", flush=True)
for step in range(3):
    if sys.argv[3] == "thread":
        thread = threading.Thread(target=point, args=("step_end", step))
        thread.start()
        thread.join()
    else:
        point("step_end", step)
    print(step, flush=True)
"""


def victim(text: str, marks: Path, where: str = "main") -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", _VICTIM, text, str(marks), where], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("where", ["main", "thread"])
def test_kill_is_sigkill_and_happens_once(tmp_path: Path, where: str) -> None:
    text = "kill rank=1 step=1 point=step_end"
    first = victim(text, tmp_path, where)
    assert first.communicate(timeout=30)[0].split() == ["ready", "0"]
    assert first.returncode == -signal.SIGKILL
    second = victim(text, tmp_path, where)
    assert second.communicate(timeout=30)[0].split() == ["ready", "0", "1", "2"]
    assert second.returncode == 0


def test_exit_and_raise(tmp_path: Path) -> None:
    process = victim("exit rank=1 point=step_end nth=3; exit rank=0 point=step_end", tmp_path)
    assert process.communicate(timeout=30)[0].split() == ["ready", "0", "1"]
    assert process.returncode == EXIT_STATUS


def test_stop_stops_until_continued(tmp_path: Path) -> None:
    process = victim("stop rank=1 step=0 point=step_end", tmp_path)
    try:
        deadline = time.monotonic() + 30
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=30)[0].split() == ["ready", "0", "1", "2"]
    finally:
        process.kill()
        process.wait(timeout=10)


def test_hang_hangs(tmp_path: Path) -> None:
    process = victim("hang rank=1 step=0 point=step_end", tmp_path)
    try:
        deadline = time.monotonic() + 30
        while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
    finally:
        process.kill()
        out, _ = process.communicate(timeout=10)
    assert out.split() == ["ready"]
