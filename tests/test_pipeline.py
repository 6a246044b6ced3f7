"""Kill the stages of real pipelines, and compare with the undisturbed run, bit by bit.

The lost stage is computed again from its checkpoint, over what the others sent it, while they keep their state; so any
message that is replayed in another order, or any random number drawn twice, shows in the digest.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from harness import Job, run_job, thorough
from regrow.testing import Fault

SCRIPT = Path(__file__).parent / "scripts" / "pipeline.py"
JOURNALED = ("--failure-domain", "rank")


@functools.cache
def undisturbed(*args: str, nproc: int) -> Job:
    job = run_job(*args, nproc=nproc, script=SCRIPT)
    assert job.code == 0, job.output
    assert len(job.ranks) == nproc
    return job


def check(*args: str, nproc: int, faults: list[Fault], die: tuple[int, ...] = (), flags=JOURNALED, **more) -> Job:
    """Run a job whose workers die by faults, and by ``die``: a step, and the ranks that die in it at once."""
    expected = undisturbed(*args, nproc=nproc)
    together = ("--die", *map(str, die)) if die else ()
    job = run_job(*args, *together, nproc=nproc, script=SCRIPT, faults=faults, flags=flags, **more)
    assert job.code == 0, job.output
    assert len(job.events("worker_lost")) == len(faults) + max(0, len(die) - 1), job.output
    assert job.digests() == expected.digests(), job.output
    last = max(expected.ranks)
    assert job.ranks[last]["losses"].items() <= expected.ranks[last]["losses"].items()
    return job


@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", ["hand", "gpipe", "1f1b", "interleaved"])
def test_every_stage_of_every_schedule(schedule):
    """One after the other, each two steps after the last: the journals of those that were replayed are used next."""
    faults = [Fault(point="in_backward", rank=rank, step=7 + 2 * rank, nth=3) for rank in range(3)]
    job = check("--schedule", schedule, "--steps", "15", nproc=3, faults=faults, spares=2)
    assert all("replay" in plan and "load" in plan for plan in job.plans()), job.plans()
    for fault, plan in zip(faults, job.plans(), strict=True):
        assert f"load     rank {fault.rank}: the checkpoint of step" in plan, plan


def test_two_neighbours_at_once_and_the_same_stage_twice():
    faults = [
        Fault(point="in_backward", rank=1, step=11, nth=2),
        Fault(point="in_backward", rank=1, step=11, nth=4),
    ]
    job = check("--steps", "14", nproc=4, faults=faults, die=(8, 1, 2), spares=2)
    assert any("load     ranks 1, 2: the checkpoint of step 5" in plan for plan in job.plans()), job.plans()


def test_a_failure_during_a_replay():
    """The replacement itself, and then a neighbour that it needs the journal of."""
    faults = [
        Fault(point="in_backward", rank=1, step=8),
        Fault(point="in_backward", rank=1, step=6, nth=3),
        Fault(point="before_transfer", rank=2, step=8),
    ]
    check("--steps", "12", nproc=3, faults=faults, spares=2)


def test_the_first_and_the_last_step():
    faults = [
        Fault(point="before_forward", rank=1, step=0),
        Fault(point="in_backward", rank=2, step=0, nth=14),
        Fault(point="step_end", rank=0, step=9),
    ]
    check("--steps", "10", nproc=3, faults=faults, spares=2)


def test_a_stage_with_a_replica_is_copied_and_one_without_is_replayed():
    faults = [Fault(point="in_backward", rank=3, step=4, nth=2)]
    job = check("--steps", "12", "--replicas", "2", nproc=4, faults=faults, die=(8, 1, 3), spares=2)
    first, *rest = job.plans()
    assert "copy     rank 3: everything at step 4 from rank 1" in first and "load" not in first
    assert "load     ranks 1, 3: the checkpoint of step 5" in rest[-1]


def test_the_first_stage_of_one_of_two_pipelines():
    """Its neighbour may not complete the step while that one's replica does: it copies it, and serves what it has sent.

    Or all go back to the checkpoint, if it was interrupted before it had sent all; the result is the same.
    """
    faults = [Fault(point="in_backward", rank=2, step=step, nth=nth) for step, nth in ((3, 2), (6, 8), (8, 9))]
    job = check("--steps", "12", "--replicas", "2", nproc=4, faults=faults, spares=2)
    assert "copy     rank 2: everything at step 3 from rank 0" in job.plans()[0]


@thorough
def test_a_collective_between_stages():
    faults = [Fault(point="in_backward", rank=1, step=8, nth=2)]
    check("--steps", "11", "--mean", "--schedule", "hand", nproc=3, faults=faults, spares=1)


def test_a_domain_is_replayed_together():
    faults = [Fault(point="in_backward", rank=2, step=8, nth=2)]
    job = check("--steps", "11", nproc=4, faults=faults, spares=1, flags=("--failure-domain", "0-1,2-3"))
    (plan,) = job.plans()
    assert "load     ranks 2, 3: the checkpoint of step 5" in plan
    assert "replay   ranks 2, 3: steps 5 to" in plan


def test_a_damaged_checkpoint_is_named_and_not_used():
    faults = [Fault(point="in_backward", rank=1, step=8, nth=2)]
    expected = undisturbed("--steps", "11", nproc=3)
    job = run_job(
        "--steps", "11", "--damage", "checkpoint", nproc=3, script=SCRIPT, faults=faults, flags=JOURNALED, spares=1
    )
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    assert "step-5.state is damaged" in job.output
    assert "the checkpoint of step 0" in job.plans()[0]


def test_a_damaged_journal_is_named_and_not_used():
    faults = [Fault(point="in_backward", rank=1, step=8, nth=2)]
    expected = undisturbed("--steps", "11", nproc=3)
    job = run_job(
        "--steps", "11", "--damage", "journal", nproc=3, script=SCRIPT, faults=faults, flags=JOURNALED, spares=1
    )
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    woken = [str(event["error"]) for event in job.events("woken")]
    assert any("step 6 in the journal of rank 0 is damaged" in error for error in woken), woken
    assert "rank 0 must go back, too" in "".join(job.plans())


def test_a_disk_that_takes_no_journal(tmp_path):
    """Training goes on and says what it costs: a lost stage takes everyone back to the checkpoint."""
    args = ("--steps", "22", "--every", "20", "--width", "4096")
    faults = [Fault(point="in_backward", rank=1, step=18, nth=2)]
    expected = undisturbed(*args, nproc=2)
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.joinpath("scratch").write_text("not a directory")
    flags = (*JOURNALED, "--journal-memory", "1")
    job = run_job(
        *args, "--checkpoint-dir", str(tmp_path / "saved"), nproc=2, script=SCRIPT, faults=faults, flags=flags,
        spares=1, log_dir=logs,
    )  # fmt: skip
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    # each process says it once until a commit: rank 0 around those of steps 0 and 20, rank 1 and its replacement twice
    assert 1 <= job.output.count("the journal gives up what was sent through step") <= 7
    assert "load     ranks 0, 1: the checkpoint of step 0" in job.plans()[0]


def test_without_journals_everyone_goes_back():
    """All on one host, which is the failure domain unless something else is said."""
    faults = [Fault(point="in_backward", rank=1, step=8, nth=2)]
    job = check("--steps", "11", nproc=3, faults=faults, spares=1, flags=())
    assert "load     ranks 0, 1, 2: the checkpoint of step 5" in job.plans()[0]
