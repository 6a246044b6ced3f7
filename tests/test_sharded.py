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


def test_hsdp():
    faults = [
        Fault(point="in_backward", rank=3, step=2, nth=3),
        Fault(point="after_update", rank=0, step=4),
        Fault(point="in_backward", rank=1, step=5),
        Fault(point="in_backward", rank=2, step=5),
    ]
    check("--how", "hsdp", "--steps", "8", nproc=4, faults=faults, spares=2)


def test_an_optimizer_whose_state_is_sharded():
    """In the middle of its update too: the owners of parameters broadcast them."""
    faults = [
        Fault(point="in_backward", rank=1, step=2),
        Fault(point="step_end", rank=0, step=4),
        Fault(point="after_update", rank=2, step=5),
    ]
    check("--how", "zero", "--steps", "8", nproc=3, faults=faults, spares=2)


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


def test_another_hosts_memory():
    """Rank 1 loses what its own host has of it; what the other host keeps of it is as good."""
    expected = harness.undisturbed("--steps", "10", nproc=4, script=SCRIPT)
    faults = [Fault(point="after_update", rank=3, step=7)]
    jobs = harness.run_hosts(
        "--steps", "10", "--damage", "gone", hosts=2, nproc=2, spares=1, faults=faults, script=SCRIPT
    )
    assert [job.code for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    ranks = jobs[0].ranks | jobs[1].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    plans = [plan for job in jobs for plan in job.plans()]
    assert "restore  rank 1: the snapshot of step" in plans[0] and "from the memory of host 1" in plans[0], plans


def test_a_lost_rack():
    """Agents, workers and their memory are gone: standbys take the ranks, the other rack has their snapshots.

    Without racks, each of hosts 2 and 3 would keep the other's snapshots; so each has one in the first rack.
    """
    expected = harness.undisturbed("--steps", "10", nproc=4, script=SCRIPT)
    args = ("--steps", "10", "--lose-host", "2", "5", "--lose-host", "3", "5")
    racks = ("a", "a", "b", "b", "b", "b")
    jobs = harness.run_hosts(*args, hosts=4, standbys=2, nproc=1, spares=1, script=SCRIPT, racks=racks)
    assert [job.code for job in jobs] == [0, 0, -9, -9, 0, 0], "".join(job.output for job in jobs)
    ranks = jobs[0].ranks | jobs[1].ranks | jobs[4].ranks | jobs[5].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    plans = [plan for job in jobs for plan in job.plans()]
    assert "another host's memory has the part of" in "".join(plans), plans
    kept = {event["rank"]: event["keepers"] for job in jobs for event in job.events("snapshot_keepers")[:1]}
    assert [kept[rank] for rank in range(4)] == [[2], [3], [0], [1]]
