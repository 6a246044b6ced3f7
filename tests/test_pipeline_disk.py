"""Real pipelines on disks that are full: training goes on, says what it cannot keep, and heals from what there is."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import Job, cases, run_job
from regrow.testing import Fault
from test_pipeline import JOURNALED, SCRIPT, undisturbed

WIDE = ("--steps", "18", "--width", "1024", "--slow-s", "0.01")
"""A checkpoint has 0.4 MB at step 0 and 1.2 MB later, of both ranks together. Steps are slow enough for one rank not to
write its second one before the other has written its first."""


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """Mount a disk of this size; skip where that is not permitted."""
    at.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "regrow-test", str(at)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield at
    finally:
        # lazily: a process that is late in ending may still have a file open there
        subprocess.run(["umount", "--lazy", str(at)], check=True, timeout=30)


def same_result(job: Job, expected: Job) -> None:
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output


@pytest.mark.parametrize(
    "flags", cases(JOURNALED, rest=[()]), ids=lambda flags: "journaled" if flags else "everyone-goes-back"
)
def test_no_room_for_a_later_checkpoint(tmp_path, flags):
    """Steps 0 and 5 fit, 10 and 15 do not, or not on both ranks: they are never committed."""
    faults = [Fault(point="in_backward", rank=rank, step=step, nth=2) for rank, step in ((1, 13), (0, 17))]
    with small_disk(tmp_path / "disk", "2m") as disk:
        job = run_job(
            *WIDE, "--checkpoint-dir", str(disk), nproc=2, script=SCRIPT, faults=faults, flags=flags, spares=1
        )
    same_result(job, undisturbed(*WIDE, nproc=2))
    assert len(job.events("worker_lost")) == 2
    assert "the checkpoint of step 10 could not be written: [Errno 28] No space left on device" in job.output
    assert "until one is, this stage goes back to step " in job.output
    assert {10, 15} >= {event["step"] for event in job.events("checkpoint_failed")} >= {10}
    assert {event["step"] for event in job.events("checkpoint_committed")} == {0, 5}
    plans = job.plans()
    if flags:  # the second loss may take both back: who is loaded from step 10 has no journal of what came before it
        assert "load     rank 1: the checkpoint of step" in plans[0] and "replay" in plans[0], plans
    else:
        assert all("load     ranks 0, 1: the checkpoint of step 5" in plan for plan in plans), plans


def test_no_room_for_the_first_checkpoint(tmp_path):
    """Training goes on, and says that it cannot heal a stage; if one is lost, the job ends with a sentence."""
    faults = [Fault(point="in_backward", rank=1, step=13, nth=2)]
    with small_disk(tmp_path / "disk", "64k") as disk:
        job = run_job(*WIDE, "--checkpoint-dir", str(disk), nproc=2, script=SCRIPT, faults=faults, flags=JOURNALED)
    sentence = "the checkpoint of step 0 could not be written: [Errno 28] No space left on device"
    assert job.output.count(sentence) == 2, job.output
    assert "until one is, the run cannot go on if this stage is lost" in job.output
    assert {event["step"] for event in job.events("checkpoint_failed")} == {0, 5, 10}
    assert job.code == 1
    assert "stage 1 (rank 1) cannot go on: no living replica holds its state" in job.output


def test_a_place_for_checkpoints_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("not a directory")
    job = run_job(*WIDE, "--checkpoint-dir", str(tmp_path / "file"), nproc=2, script=SCRIPT, flags=JOURNALED)
    same_result(job, undisturbed(*WIDE, nproc=2))
    assert job.output.count("the checkpoint of step 0 could not be written: [Errno 20] Not a directory") == 2


LONG = ("--steps", "22", "--every", "20", "--width", "4096")
"""What rank 0 sends to rank 1 in a step: 256 KB."""


@pytest.mark.parametrize("whole", [False, True], ids=["the-journals-disk", "the-disk-of-all-logs"])
def test_no_room_for_the_journal(tmp_path, whole):
    """Some steps fit on the disk, not all since the checkpoint: a lost stage takes everyone back."""
    faults = [Fault(point="in_backward", rank=1, step=18, nth=2)]
    logs = tmp_path / "logs"
    flags = (*JOURNALED, "--journal-memory", "1")
    with small_disk(logs if whole else logs / "scratch", "3m"):
        job = run_job(
            *LONG, "--checkpoint-dir", str(tmp_path / "saved"), nproc=2, script=SCRIPT, faults=faults, flags=flags,
            spares=1, log_dir=logs,
        )  # fmt: skip
        plans, given_up = job.plans(), job.events("journal_given_up")
    same_result(job, undisturbed(*LONG, nproc=2))
    assert "the journal gives up what was sent through step" in job.output
    assert "No space left on device" in job.output
    assert "a lost stage takes everyone back to step 0" in job.output
    assert "load     ranks 0, 1: the checkpoint of step 0" in plans[0]
    assert given_up
