"""What real jobs do and look like when workers are killed: options, refusals, bugs, lost connections, two nodes."""

from __future__ import annotations

import re

import psutil
import pytest
import torch

from harness import Job, check, run_hosts, run_job, thorough, undisturbed
from regrow.testing import Fault


@thorough
def test_options_of_ddp():
    faults = [
        Fault(point="in_backward", rank=2, step=0),
        Fault(point="step_end", rank=1, step=1),
        Fault(point="in_backward", rank=0, step=3, nth=2),
        Fault(point="after_update", rank=1, step=5),
    ]
    options = ("gradient_as_bucket_view", "find_unused_parameters")
    check("--steps", "8", "--depth", "6", "--ddp", *options, nproc=3, faults=faults, spares=2)


def test_everything_a_script_may_protect():
    """Gradient accumulation, scaler, clipping, a moving average, and a collective after the update."""
    args = ("--steps", "9", "--accumulate", "2", "--scaler", "--clip", "--ema", "--tail", "--depth", "4")
    faults = [
        Fault(point="in_backward", rank=0, step=3, nth=2),
        Fault(point="in_backward", rank=1, step=5, nth=99),
        Fault(point="after_update", rank=2, step=6),
    ]
    job = check(*args, nproc=3, faults=faults, deaths=2, spares=1)
    # on a busy machine the others may hear of the loss before they have updated anything
    assert re.search("to the very bits|no survivor had updated anything in step 6", "".join(job.plans())), job.plans()


def states(job: Job, step: int, rank: int) -> list[torch.Tensor]:
    state = torch.load(job.log_dir / "out" / f"step{step}.rank{rank}.pt", weights_only=True)
    return [*state["params"], *(tensor for entry in state["optimizer"].values() for tensor in entry.values())]


def test_inexact_undo_is_close_and_replicas_agree():
    """Right after the recovery: within the bound that docs/undo.md states, 5 ulp of the larger of old and new value."""
    args = ("--steps", "8", "--wait-free", "--depth", "6", "--dump-at", "3", "4")
    expected = undisturbed(*args, nproc=3)
    job = run_job(*args, "--inexact", nproc=3, faults=[Fault(point="between_updates", rank=1, step=3, nth=2)])
    assert job.code == 0, job.output
    assert "by arithmetic" in "".join(job.plans())
    assert len({report["weights"] for report in job.ranks.values()}) == 1
    for rank in range(3):
        before, after = states(expected, 3, rank), states(expected, 4, rank)
        for old, new, healed, twin in zip(before, after, states(job, 3, rank), states(job, 3, 0), strict=True):
            bound = 5 * torch.finfo(old.dtype).eps * torch.maximum(old.abs(), new.abs())
            assert ((healed - old).abs() <= bound).all()
            assert torch.equal(healed, twin)
    for rank, report in expected.ranks.items():
        for step, loss in report["losses"].items():
            if step in job.ranks[rank]["losses"]:
                assert job.ranks[rank]["losses"][step] == pytest.approx(loss, rel=1e-4)


@thorough
def test_a_model_without_own_state():
    """No dropout, no buffers, no loader: nothing is ever published within a step."""
    faults = [Fault(point="after_update", rank=0, step=2), Fault(point="in_backward", rank=1, step=4)]
    check("--steps", "6", "--bare", nproc=2, faults=faults, spares=1)


def test_a_lost_connection_between_the_living():
    """Nobody died: a new generation with the same processes."""
    expected = undisturbed("--steps", "6", nproc=3)
    job = run_job("--steps", "6", "--sever-at", "3", nproc=3, flags=("--dead-after", "1"))
    assert job.code == 0, job.output
    assert job.digests() == expected.digests()
    assert job.events("worker_lost") == []
    assert len(job.events("generation")) == 1


def test_an_end_without_destroying_the_groups():
    """Threads of gloo that still hold tensors must not meet an interpreter that is ending: that would be SIGABRT."""
    job = run_job("--steps", "2", "--unwaited", nproc=2)
    assert job.code == 0, job.output
    assert "replaced on the way" in job.output
    assert sorted(job.ranks) == [0, 1]


def test_survivors_keep_their_processes():
    job = check("--steps", "6", nproc=3, faults=[Fault(point="in_backward", rank=1, step=2)], spares=1)
    started = {event["rank"]: event["pid"] for event in job.events("worker_started") if event.get("rank") is not None}
    for rank in (0, 2):
        assert job.ranks[rank]["pid"] == started[rank]
        attempts = job.ranks[rank]["attempts"]
        assert [step for step, completed in attempts if completed] == list(range(6))
        # a slow one may hear of the loss before it has begun the step
        assert [step for step, completed in attempts if not completed] in ([2], [])


def test_a_bug_is_not_a_fault():
    job = run_job("--raise-at", "7", "--steps", "12", nproc=2, spares=1)
    assert job.code == 1
    assert "ValueError: this script has a bug" in job.output
    assert "rank 1 failed at step 7 3 times" in job.output
    assert len(job.events("worker_lost")) == 3
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(job.log_dir) in str(process.info["cmdline"])
    ]


@pytest.mark.parametrize(
    ("nproc", "args", "sentence"),
    [
        (2, ("--nothing",), "nothing is protected: call run.protect("),
        (2, ("--optimizer", "lbfgs"), "LBFGS"),
        (1, (), "a world of 1 worker has no replica"),
        (2, ("--ddp", "static_graph"), "static_graph=True is not supported yet"),
        (2, ("--wait-free", "--clip"), "was changed after backward"),
        (2, ("--wait-free", "--accumulate", "2", "--sync-all"), "was reduced twice in one step"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(nproc, args, sentence):
    job = run_job(*args, nproc=nproc)
    assert job.code == 1
    assert "Traceback" not in job.output
    said = [line for line in job.output.splitlines() if sentence in line]
    assert len(said) == 1, job.output


def test_two_nodes():
    """Two agents with two addresses: the same result as four workers under one agent, also when one is killed."""
    expected = undisturbed("--steps", "8", "--optimizer", "adam", nproc=4)
    faults = [Fault(point="in_backward", rank=3, step=3), Fault(point="after_update", rank=0, step=5)]
    jobs = run_hosts("--steps", "8", "--optimizer", "adam", hosts=2, nproc=2, spares=1, faults=faults)
    assert [job.code for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    ranks = jobs[0].ranks | jobs[1].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    assert len(jobs[0].events("worker_lost")) == len(jobs[1].events("worker_lost")) == 1


def test_a_lost_host():
    """Replicas have the parameters; what was the lost ranks' own lies in the memory of another host."""
    args = ("--steps", "8", "--optimizer", "adam")
    expected = undisturbed(*args, nproc=4)
    jobs = run_hosts(*args, "--lose-host", "2", "3", hosts=2, standbys=1, nproc=2, spares=2)
    assert [job.code for job in jobs] == [0, -9, 0], "".join(job.output for job in jobs)
    ranks = jobs[0].ranks | jobs[2].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
