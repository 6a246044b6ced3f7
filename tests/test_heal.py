"""Kill workers of real jobs at every named point, and compare with the undisturbed run, bit by bit.

One job takes many kills, one after the other, each at another point, rank and step: any recovery that is off by one
bit shows in the digest of the final weights, optimizer state, scheduler, buffers and random numbers of every rank.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import threading

import psutil
import pytest
import torch

from harness import Job, run_job
from regrow import events
from regrow.testing import Fault

IN_STEP = ("before_forward", "in_backward", "after_update", "step_end")
IN_RECOVERY = ("rejoin", "before_transfer", "after_transfer")


@functools.cache
def undisturbed(*args: str, nproc: int) -> Job:
    job = run_job(*args, nproc=nproc)
    assert job.code == 0, job.output
    assert len(job.ranks) == nproc
    return job


def check(*args: str, nproc: int, faults: list[Fault], deaths: int | None = None, **more) -> Job:
    expected = undisturbed(*args, nproc=nproc)
    job = run_job(*args, nproc=nproc, faults=faults, **more)
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    lost = job.events("worker_lost")
    assert len(lost) == (len(faults) if deaths is None else deaths), job.output
    return job


def each_point_and_rank(points: tuple[str, ...], nproc: int, first: int, apart: int = 2) -> list[Fault]:
    """Every point at every rank, one kill at a time, ``apart`` steps from each other."""
    steps = itertools.count(first, apart)
    return [Fault(point=point, rank=rank, step=next(steps)) for point in points for rank in range(nproc)]


CASES = [
    (2, "sgd", "ddp", 0),
    (3, "adamw", "wait-free", 0),
    (4, "adam", "ddp", 1),
]
if os.environ.get("REGROW_TEST_ALL"):  # every combination takes most of an hour: `make test-all`
    CASES = list(itertools.product((2, 3, 4), ("sgd", "adamw", "adam"), ("ddp", "wait-free"), (0, 1)))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("nproc", "optimizer", "mode", "workers"), CASES)
def test_each_point_and_each_rank(nproc, optimizer, mode, workers):
    """First and last step included."""
    args = ("--optimizer", optimizer, "--depth", "6", "--workers", str(workers))
    args += ("--wait-free",) if mode == "wait-free" else ()
    points = (*IN_STEP, "between_updates") if "--wait-free" in args else IN_STEP
    faults = [Fault(point="before_forward", rank=nproc - 1, step=0), *each_point_and_rank(points, nproc, 1)]
    last = faults[-1].step + 2
    faults += [Fault(point="in_backward", rank=0, step=last), Fault(point="step_end", rank=1, step=last)]
    check("--steps", str(last + 1), *args, nproc=nproc, faults=faults, spares=2, timeout_s=240)


def test_failures_during_recovery():
    """Each of these strikes while another loss is being healed: a survivor, and the replacement itself."""
    faults = []
    for number, point in enumerate(IN_RECOVERY):
        for who in (0, 1):  # 1 is the rank that was just replaced
            step = 2 + 4 * number + 2 * who
            faults.append(Fault(point="in_backward", rank=1, step=step))
            faults.append(Fault(point=point, rank=who, step=None if point == "rejoin" and who == 1 else step))
    faults += [Fault(point="in_backward", rank=2, step=15), Fault(point="replacement_setup", rank=2)]
    check("--steps", "18", "--wait-free", "--depth", "6", nproc=3, faults=faults, spares=2, timeout_s=240)


def test_two_at_once_and_the_first_rank():
    faults = [
        Fault(point="in_backward", rank=0, step=2),
        Fault(point="in_backward", rank=1, step=4),
        Fault(point="in_backward", rank=3, step=4),
        Fault(point="between_updates", rank=0, step=6),
        Fault(point="between_updates", rank=2, step=6),
    ]
    job = check("--steps", "9", "--wait-free", "--depth", "6", nproc=4, faults=faults, spares=2)
    assert "undo" in "".join(job.plans())


def test_a_loss_that_is_heard_of_between_two_steps():
    """Rank 0 has completed step 2 and not begun step 3: it must not go back to how step 2 began."""
    faults = [Fault(point="before_forward", rank=1, step=3)]
    expected = undisturbed("--steps", "6", nproc=3)
    job = run_job("--steps", "6", "--linger-at", "2", nproc=3, spares=1, faults=faults)
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    assert [event["error"] for event in job.events("woken") if event["rank"] == 0] == [None]


BETWEEN = [Fault(point="step_end", rank=1, step=0)]
TWO_BETWEEN = [Fault(point="step_end", rank=rank, step=0) for rank in (0, 2)]
AROUND_REBUILDING = {
    # all survivors stand between the first two steps
    "two-between": (("--wait-free",), "all", TWO_BETWEEN),
    # buckets are rebuilt in the middle of the step that must then begin with the first ones again
    "accumulating": (("--accumulate", "2", "--sync-all"), "", [Fault(point="in_backward", rank=2, step=0, nth=3)]),
}
if os.environ.get("REGROW_TEST_ALL"):
    AROUND_REBUILDING |= {
        "between": (("--wait-free",), "all", BETWEEN),
        "between-plain": ((), "all", BETWEEN),
        "two-between-plain": ((), "all", TWO_BETWEEN),
        # no update in the first step, so no rebuilding before it
        "no-update": (("--idle-at", "0"), "all", BETWEEN),
        # rank 0 stands between the first two steps while the others are in the second one
        "some-between": ((), "one", [Fault(point="before_forward", rank=1, step=1)]),
        # rank 0, whose layout counts, is lost with its first update
        "after-update": ((), "", [Fault(point="after_update", rank=0, step=0)]),
    }


@pytest.mark.parametrize("case", AROUND_REBUILDING)
def test_a_loss_around_the_rebuilding_of_buckets(case):
    """DDP rebuilds its buckets after the first backward; every step must be summed in the order that it has alone."""
    more, lingering, faults = AROUND_REBUILDING[case]
    args = ("--steps", "4", "--depth", "6", *more)
    expected = undisturbed(*(arg for arg in args if arg != "--wait-free"), nproc=3)
    late = {"": (), "one": ("--linger-at", "0"), "all": ("--linger-at", "0", "--linger-all")}[lingering]
    job = run_job(*args, *late, nproc=3, spares=len(faults), faults=faults)
    assert job.code == 0, job.output
    assert len(job.events("worker_lost")) == len(faults), job.output
    assert job.digests() == expected.digests(), job.output
    assert (None in [event["error"] for event in job.events("woken")]) == bool(lingering)


def test_a_stopped_worker_counts_as_dead():
    faults = [Fault(point="in_backward", rank=1, step=2, action="stop")]
    job = check("--steps", "5", nproc=2, faults=faults, flags=("--dead-after", "1"))
    assert "heartbeat" in job.output


def test_a_replacement_that_is_stopped_while_it_starts(tmp_path):
    """It has no heartbeat to miss yet: the agent must see it from outside."""
    done = threading.Event()

    def stop_the_replacement() -> None:
        while not done.wait(0.02):
            for event in events.read(tmp_path) if list(tmp_path.glob("events*")) else []:
                if event["event"] == "worker_started" and event["incarnation"] == 1:
                    os.kill(event["pid"], signal.SIGSTOP)
                    return

    thread = threading.Thread(target=stop_the_replacement, name="stopper")
    thread.start()
    try:
        faults = [Fault(point="in_backward", rank=1, step=2)]
        job = check("--steps", "5", nproc=2, faults=faults, deaths=2, flags=("--dead-after", "1"), log_dir=tmp_path)
    finally:
        done.set()
        thread.join()
    assert "while it started" in job.output


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
    assert "to the very bits" in "".join(job.plans())


def states(job: Job, step: int, rank: int) -> list[torch.Tensor]:
    state = torch.load(job.log_dir / "out" / f"step{step}.rank{rank}.pt", weights_only=True)
    return [*state["params"], *(tensor for entry in state["optimizer"].values() for tensor in entry.values())]


def test_inexact_undo_is_close_and_replicas_agree():
    """Right after the recovery: within the bound that docs/undo.md states, 5 ulp of the larger of old and new value."""
    args = ("--steps", "8", "--wait-free", "--depth", "6", "--dump-at", "3", "4")
    expected = undisturbed(*args, nproc=3)
    job = run_job(*args, "--inexact", nproc=3, faults=[Fault(point="between_updates", rank=1, step=3)])
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
    attempts = [[0, True], [1, True], [2, False], *([step, True] for step in range(2, 6))]
    for rank in (0, 2):
        assert job.ranks[rank]["pid"] == started[rank]
        assert job.ranks[rank]["attempts"] == attempts


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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fault = [Fault(point="in_backward", rank=3, step=3), Fault(point="after_update", rank=0, step=5)]
    jobs: dict[int, Job] = {}

    def node(number: int) -> None:
        flags = ("--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"127.0.0.1:{port}")
        flags += ("--host-addr", f"127.0.0.{number + 1}")
        args = ("--steps", "8", "--optimizer", "adam")
        jobs[number] = run_job(*args, nproc=2, spares=1, flags=flags, faults=fault, env={"REGROW_TOKEN": "secret"})

    threads = [threading.Thread(target=node, args=(number,), name=f"node-{number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [jobs[number].code for number in range(2)] == [0, 0], jobs[0].output + jobs[1].output
    ranks = jobs[0].ranks | jobs[1].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    assert len(jobs[0].events("worker_lost")) == len(jobs[1].events("worker_lost")) == 1
