"""Kill stages while a checkpoint is written and committed: no rank may count on one that another does not have.

All this happens in threads beside the training, so where in its steps a rank dies is left to chance; the result is not.
"""

from __future__ import annotations

import re

import pytest

from harness import Job, cases, run_job
from regrow.testing import Fault
from test_pipeline import JOURNALED, SCRIPT, undisturbed

ARGS = ("--steps", "15", "--slow-s", "0.01")
POINTS = ("checkpoint_write", "checkpoint_written", "checkpoint_commit")


def check(*faults: Fault, args: tuple[str, ...] = ("--commit-first",)) -> Job:
    """By default the job waits for its checkpoints now and then: else it may end before one is committed."""
    expected = undisturbed(*ARGS, nproc=3)
    job = run_job(*ARGS, *args, nproc=3, script=SCRIPT, faults=list(faults), flags=JOURNALED, spares=2)
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    return job


def lost(job: Job) -> list[int]:
    return sorted(event["rank"] for event in job.events("worker_lost"))


def committed(job: Job) -> dict[int, set[int]]:
    """Return the checkpoints that were committed, and by whom."""
    found: dict[int, set[int]] = {}
    for event in job.events("checkpoint_committed"):
        found.setdefault(event["step"], set()).add(event["rank"])
    return found


@pytest.mark.parametrize("point", cases("checkpoint_commit", rest=POINTS[:2]))
def test_a_middle_stage_and_then_the_first(point):
    job = check(Fault(point=point, rank=1, step=5), Fault(point=point, rank=0, step=10))
    assert lost(job) == [0, 1], job.output
    assert 2 in committed(job)[10]  # rank 1 may die so late that its replacement finds it committed
    if point != "checkpoint_write":  # on a busy machine the next one may be written before this one is committed
        assert any(re.search(r"load     rank 1: the checkpoint of step (5|10)\b", p) for p in job.plans()), job.plans()


def test_a_neighbour_dies_shortly_afterwards():
    """In the recovery of the first: what that one was to be replayed from is gone, too."""
    job = check(Fault(point="checkpoint_commit", rank=1, step=5), Fault(point="rejoin", rank=2))
    assert lost(job) == [1, 2], job.output
    assert 10 in committed(job)


def test_two_neighbours_in_the_same_commit():
    """The third may have committed, and have dropped its journal, or not."""
    job = check(*(Fault(point="checkpoint_commit", rank=rank, step=5) for rank in (0, 1)))
    assert lost(job) == [0, 1], job.output
    assert all(re.search(r"the checkpoint of step (5|10)\b", plan) for plan in job.plans()), job.plans()


def test_the_very_first_checkpoint():
    """Before the set-up counts as done all start again; from then on the stage is replayed from there."""
    faults = [Fault(point=point, rank=rank, step=0) for rank, point in enumerate(POINTS)]
    assert lost(check(*faults))  # one at least: those who die together before all start again are not told apart


def test_a_checkpoint_that_takes_for_ever():
    """Nobody waits for what this rank skips meanwhile, and nobody counts on it."""
    faults = [
        Fault(point="checkpoint_write", rank=1, step=5, action="hang"),
        Fault(point="in_backward", rank=1, step=13, nth=2),
    ]
    job = check(*faults, args=())
    assert [(event["rank"], event["step"]) for event in job.events("checkpoint_skipped")] == [(1, 10)]
    assert {event["rank"] for event in job.events("checkpoint_refused") if event["step"] == 10} >= {0, 2}
    assert 10 not in committed(job) and committed(job)[5] >= {0, 2}
    assert "load     rank 1: the checkpoint of step 0" in job.plans()[0]
