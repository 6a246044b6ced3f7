"""Kill ranks whose part of the state is nowhere else, and compare with the undisturbed run, bit by bit.

Each rank's snapshots lie in its host's memory and outlive it: the newest step of which everyone has one, or stands at,
is where all go on.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import harness
from regrow.testing import Fault

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
check = partial(harness.check, script=SCRIPT)


def test_fsdp_at_every_point_of_a_step():
    faults = [
        Fault(point="in_backward", rank=1, step=0),
        Fault(point="before_forward", rank=0, step=2),
        Fault(point="in_backward", rank=2, step=3, nth=4),
        Fault(point="after_update", rank=0, step=5),
        Fault(point="step_end", rank=1, step=6),
        Fault(point="step_end", rank=2, step=9),
    ]
    job = check("--steps", "10", nproc=3, faults=faults, spares=2)
    assert all("from the host's memory" in plan for plan in job.plans()), job.plans()


def test_fsdp_in_mixed_precision_with_collectives_around_the_update():
    faults = [Fault(point="in_backward", rank=0, step=3, nth=9), Fault(point="after_update", rank=1, step=4)]
    check("--mixed", "--clip", "--tail", "--steps", "7", nproc=2, faults=faults, spares=1)


def test_fsdp_in_the_middle_of_a_snapshot():
    faults = [
        Fault(point="snapshot_copy", rank=1, step=2),
        Fault(point="snapshot_taken", rank=0, step=4),
        Fault(point="snapshot_copy", rank=2, step=6),
        Fault(point="snapshot_taken", rank=1, step=6),
    ]
    check("--steps", "10", nproc=3, faults=faults, spares=2)


def test_fsdp_during_a_recovery_and_two_at_once():
    faults = [
        Fault(point="in_backward", rank=1, step=3),
        Fault(point="before_transfer", rank=2),
        Fault(point="rejoin", rank=0, nth=2),
        Fault(point="in_backward", rank=0, step=6),
        Fault(point="in_backward", rank=1, step=6),
    ]
    check("--steps", "10", nproc=3, faults=faults, spares=2)


def test_all_workers_lost_at_once():
    """At a step, in the middle of a snapshot, and with a memory that is gone; before that, one in the set-up.

    Only where not everyone has a whole snapshot does the run start from its beginning.
    """
    expected = harness.undisturbed("--steps", "10", nproc=3, script=SCRIPT)
    strikes = [("kill", "1", "-1"), ("all", "0", "3"), ("forget", "2", "4"), ("all", "1", "8")]
    args = [word for strike in strikes for word in ("--strike", *strike)]
    faults = [Fault(point="snapshot_copy", rank=rank, step=6) for rank in range(3)]
    job = harness.run_job("--steps", "10", *args, nproc=3, faults=faults, spares=1, script=SCRIPT)
    assert job.code == 0, job.output
    assert job.digests() == expected.digests()
    assert job.output.count("from its beginning") == 1 and "the state of rank 2 is lost" in job.output, job.output
    assert job.output.count("all ranks are set up") == 2, job.output
    steps = [event["step"] for event in job.events("plan")]
    assert steps[0] in (1, 2, 3) and {*steps[1:-1]} <= {4, 5, 6} and steps[-1] in (6, 7, 8), job.output
    assert "the memory of their host still has the part of ranks 0, 1, 2" in job.plans()[-1]


def test_a_snapshot_every_few_steps():
    """All go back by some steps, and do them again; the first one after that is taken where they go on."""
    faults = [
        Fault(point="after_update", rank=1, step=2),
        Fault(point="in_backward", rank=0, step=8),
        Fault(point="in_backward", rank=2, step=9),
    ]
    job = check("--steps", "14", nproc=3, faults=faults, spares=2, flags=("--snapshot-every", "4"))
    taken = [event["taken"] for event in job.events("snapshots")]
    assert len(taken) == 3 and max(taken) < 12, taken


def test_a_stopped_rank():
    faults = [Fault(point="in_backward", rank=1, step=3, action="stop")]
    check("--steps", "10", nproc=3, faults=faults, spares=1, flags=("--dead-after", "2"))


@pytest.mark.parametrize("how, said", [("newest", "the snapshot of step 3"), ("all", "")])
def test_a_damaged_snapshot_is_named_and_not_used(how, said):
    expected = harness.undisturbed("--steps", "10", nproc=3, script=SCRIPT)
    job = harness.run_job("--steps", "10", "--damage", how, nproc=3, script=SCRIPT, spares=1)
    assert "the snapshot of rank 1 at step 4 is damaged: part" in job.output, job.output
    if how == "newest":
        assert job.code == 0, job.output
        assert said in job.plans()[-1] and job.digests() == expected.digests()
    else:
        assert job.code == 1
        assert "the state of rank 1 is lost: no replica of it lives" in job.output


def test_what_does_not_fit_is_refused_with_the_numbers():
    job = harness.run_job("--steps", "3", "--pretend-room", "1000", nproc=2, script=SCRIPT)
    assert job.code == 1
    assert "each in two buffers, need" in job.output and "Traceback" not in job.output, job.output
    assert "1.00 kB is there (a limit that is pretended)" in job.output, job.output
