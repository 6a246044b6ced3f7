"""Lose ranks with all that is exact of them: only their blocks go back, the others keep their processes and values.

The result is never the undisturbed run's; it must be near it, and none of this may happen unless it was allowed.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import harness
from regrow.testing import Fault

SHARDED = Path(__file__).parent / "scripts" / "sharded.py"
PIPELINE = Path(__file__).parent / "scripts" / "pipeline.py"
LENGTH = ("--steps", "24")


def last_loss(job: harness.Job, ranks: list[int], steps: int = 8) -> float:
    """Return the mean loss of the last steps, over some ranks."""
    losses = [loss for rank in ranks for loss in list(job.ranks[rank]["losses"].values())[-steps:]]
    return sum(losses) / len(losses)


def near(job: harness.Job, expected: harness.Job, ranks: list[int], losing: list[int], within: float = 0.4) -> None:
    """Check that each rank has come about where it would have, measured by how far it went; the loss as well."""
    assert job.code == 0, job.output
    found, wanted = last_loss(job, losing), last_loss(expected, losing)
    assert abs(found - wanted) < 0.05 * wanted, (found, wanted)
    for rank in ranks:
        there = expected.ranks[rank]
        off = math.dist(job.ranks[rank]["values"], there["values"]) / math.dist(there["began"], there["values"])
        assert off < within, (rank, off)


def sharded(*args: str, nproc: int = 3, **more) -> harness.Job:
    return harness.run_job(*LENGTH, "--approximate", *args, nproc=nproc, script=SHARDED, **more)


def test_a_rank_whose_snapshots_are_lost():
    """Before the first round, when all blocks are as new as the state, and later on."""
    expected = harness.undisturbed(*LENGTH, nproc=3, script=SHARDED)
    job = sharded("--strike", "lose", "2", "0", "--strike", "lose", "1", "13", spares=2)
    near(job, expected, [0, 1, 2], [0, 1, 2])
    early, plan = job.plans()
    assert "patch    rank 2: " in early and "its cost cannot be predicted: too few points" in early, early
    assert "patch    rank 1: " in plan and "blocks from the running checkpoint" in plan, plan
    assert "keep     ranks 0, 2: live parameters and optimizer state, of step 13" in plan, plan
    assert "cost     " in plan and "warning  the result will not be the undisturbed run's" in plan, plan
    assert all({"expected", "bound", "c"} <= {*event} for event in job.events("plan"))
    assert [event["step"] for event in job.events("plan")] == [0, 13]
    first, second = (event["stale"] for event in sorted(job.events("put_back"), key=lambda event: event["step"]))
    assert {*first.values()} == {0} and first.keys() == second.keys()
    ages = second.values()
    assert max(ages) <= 13 and min(ages) <= 5 and len({*ages}) > 1, second  # storage may be late with a round
    assert [event["rank"] for event in job.events("worker_lost")] == [2, 1]  # the others keep their processes
    assert job.digests() != expected.digests()
    assert not list(job.log_dir.glob("scratch/running/*")), "something is left behind"


def test_a_block_of_which_nothing_whole_is_left():
    """It would keep the value that the script began with, which no plan has reckoned with: not used."""
    job = sharded("--strike", "spoil", "1", "13", spares=1)
    assert job.code != 0
    assert "the running checkpoint has nothing whole: it is not used" in job.output, job.output
    assert not job.events("put_back") and job.events("running_incomplete")
    assert "the state of rank 1" in job.output.splitlines()[-1], job.output


def test_what_is_exact_comes_first(tmp_path):
    """A snapshot is there, so the result is the same bits; and so it is where nothing approximate was allowed."""
    expected = harness.undisturbed(*LENGTH, nproc=3, script=SHARDED)
    job = sharded("--strike", "kill", "1", "13", spares=1)
    assert job.code == 0 and job.digests() == expected.digests(), job.output
    assert "from the host's memory" in job.plans()[0] and not job.events("put_back")
    flags = ("--ckpt-dir", str(tmp_path), "--ckpt-every", "2")
    args = (*LENGTH, "--strike", "lose", "1", "13")
    job = harness.run_job(*args, nproc=3, script=SHARDED, flags=flags, spares=1)
    assert job.code == 0 and job.digests() == expected.digests(), job.output
    assert "all take the checkpoint on storage" in job.plans()[0], job.plans()


@harness.thorough
def test_lost_again_and_again():
    """In the recovery, before and after its blocks are in place, another one beside it, and once more later on."""
    expected = harness.undisturbed(*LENGTH, nproc=3, script=SHARDED)
    faults = [
        Fault(point="before_transfer", rank=1),
        Fault(point="after_transfer", rank=1),
        Fault(point="before_transfer", rank=0, nth=3),
    ]
    job = sharded("--strike", "lose", "1", "9", "--strike", "lose", "2", "15", spares=3, faults=faults)
    near(job, expected, [0, 1, 2], [0, 1, 2], within=0.8)
    assert len(job.events("worker_lost")) == 5, job.output
    plans = job.plans()
    assert [*job.ranks[0]["losses"]][-1] == "23" and all("patch" in plans[at] for at in (0, 1, 2, -1)), plans
    assert "restore  rank 0: the snapshot of step 9" in plans[3], plans


@harness.thorough
@pytest.mark.parametrize("how, lost", [("hsdp", (1, 3)), ("zero", (1,))])
def test_other_ways_to_shard(how, lost, tmp_path):
    """HSDP: both replicas of a part are lost, and are alike afterwards. The blocks lie beside the checkpoints."""
    strikes = [word for rank in lost for word in ("--strike", "lose", str(rank), "11")]
    flags = ("--ckpt-dir", str(tmp_path), "--ckpt-every", "100")
    job = sharded("--how", how, *strikes, nproc=4, spares=2, flags=flags)
    assert job.code == 0 and any("patch" in plan for plan in job.plans()), job.output
    held = [job.ranks[rank]["values"] for rank in range(4)]
    assert held[0] == held[2] and held[1] == held[3] and (held[0] == held[1]) == (how == "zero")
    (begun, *_) = job.events("running_begun")
    assert begun["directory"].startswith(f"{tmp_path}/running/") and not (tmp_path / "running").exists()


def test_a_stage_of_a_pipeline():
    """Its checkpoints are lost with it; what the others have sent it is of no use then."""
    args = ("--steps", "20", "--every", "100", "--norm", "layer")
    expected = harness.undisturbed(*args, nproc=3, script=PIPELINE)
    lose = ("--lose", "13", "1")
    flags = ("--failure-domain", "rank")
    job = harness.run_job(*args, *lose, nproc=3, script=PIPELINE, flags=flags, spares=1)
    assert job.code == 1 and "stage 1 (rank 1) cannot go on" in job.output, job.output
    faults = [Fault(point="in_backward", rank=1, step=17)]  # by then there is a checkpoint again, and journals
    job = harness.run_job(*args, "--approximate", *lose, nproc=3, script=PIPELINE, flags=flags, spares=2, faults=faults)
    near(job, expected, [0, 1, 2], [2])
    first, second = job.plans()
    assert "patch    rank 1" in first and "keep     ranks 0, 2" in first, first
    assert "load     rank 1: the checkpoint of step 1" in second and "replay   rank 1" in second, second


@harness.thorough
def test_a_host_is_lost_with_all_that_it_kept(tmp_path):
    """One snapshot of each rank, in its own host's memory: what is left lies on storage that hosts share."""
    args = ("--how", "fsdp", *LENGTH, "--approximate", "--strike", "host", "1", "13")
    flags = ("--snapshot-copies", "1", "--ckpt-dir", str(tmp_path), "--ckpt-every", "100")
    jobs = harness.run_hosts(*args, hosts=2, standbys=1, nproc=1, flags=flags, script=SHARDED)
    assert jobs[0].code == 0, jobs[0].output
    (plan,) = jobs[0].plans()
    assert "patch    rank 1" in plan and "a survivor's, with random numbers anew" in plan, plan
    assert [*jobs[0].ranks[0]["losses"]] == [str(step) for step in range(24)]
    assert (tmp_path / "step-00000024").exists() and not (tmp_path / "running").exists()


def test_what_cannot_be_is_refused():
    import regrow
    from regrow.run.approximate import given

    assert given(False) is None and given(True) == regrow.Approximate(every=16, fraction=1 / 8, priority="distance")
    with pytest.raises(ValueError, match="say True, or regrow"):
        given("yes")
    with pytest.raises(ValueError, match="give one of distance, relative"):
        regrow.Approximate(priority="alphabetical")
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        regrow.Approximate(fraction=2)
