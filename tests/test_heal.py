"""Kill workers of real jobs at every named point, and compare with the undisturbed run, bit by bit.

One job takes many kills, one after the other, each at another point, rank and step: any recovery that is off by one
bit shows in the digest of the final weights, optimizer state, scheduler, buffers and random numbers of every rank.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading

import pytest

from harness import cases, check, run_job, undisturbed
from regrow import events
from regrow.testing import Fault

IN_STEP = ("before_forward", "in_backward", "after_update", "step_end")
IN_RECOVERY = ("rejoin", "before_transfer", "after_transfer")


def each_point_and_rank(points: tuple[str, ...], nproc: int, first: int, apart: int = 2) -> list[Fault]:
    """Every point at every rank, one kill at a time, ``apart`` steps from each other."""
    steps = itertools.count(first, apart)
    return [Fault(point=point, rank=rank, step=next(steps)) for point in points for rank in range(nproc)]


CASES = [
    (2, "sgd", "ddp", 0),
    (3, "adamw", "wait-free", 0),
    (4, "adam", "ddp", 1),
]
if os.environ.get("REGROW_TEST_ALL"):  # every combination takes half an hour: `make test-all`
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
        # whichever comes first may end the step for the other; done again it has no early updates
        Fault(point="between_updates", rank=0, step=6),
        Fault(point="between_updates", rank=2, step=6),
        Fault(point="between_updates", rank=0, step=9, nth=2),  # by then every survivor has updated something
    ]
    deaths = range(len(faults) - 1, len(faults) + 1)
    job = check("--steps", "11", "--wait-free", "--depth", "6", nproc=4, faults=faults, deaths=deaths, spares=2)
    assert "undo" in "".join(job.plans())


def test_a_loss_that_is_heard_of_between_two_steps():
    """Rank 0 has completed step 2 and not begun step 3: it must not go back to how step 2 began."""
    faults = [Fault(point="before_forward", rank=1, step=3)]
    expected = undisturbed("--steps", "6", nproc=3)
    job = run_job("--steps", "6", "--meet-after", "2", "--linger", "0", nproc=3, spares=1, faults=faults)
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    assert [event["error"] for event in job.events("woken") if event["rank"] == 0] == [None]


BETWEEN = [Fault(point="before_forward", rank=1, step=1)]
TWO_BETWEEN = [Fault(point="before_forward", rank=rank, step=1) for rank in (0, 2)]
MIDDLE = [Fault(point="in_backward", rank=2, step=0, nth=3)]
AROUND_REBUILDING = {
    # all survivors stand between the first two steps
    "two-between": (("--wait-free",), (1,), TWO_BETWEEN),
    # buckets are rebuilt in the middle of the step that must then begin with the first ones again
    "accumulating": (("--accumulate", "2", "--sync-all"), (), MIDDLE),
    # the same, and rank 1 had to take rank 0's buckets, since its own gradients come in another order
    "orders-differ": (("--accumulate", "2", "--sync-all", "--fork"), (), MIDDLE),
    "between": ((), (0, 2), BETWEEN),
    "two-between-plain": ((), (1,), TWO_BETWEEN),
    # no update in the first step, so no rebuilding before it
    "no-update": (("--idle-at", "0"), (0, 2), BETWEEN),
    # rank 0 stands between the first two steps while another is in the second one
    "some-between": ((), (0,), BETWEEN),
    # rank 0, whose layout counts, is lost with its first update
    "after-update": ((), (), [Fault(point="after_update", rank=0, step=0)]),
}
USUAL = ("two-between", "orders-differ")


@pytest.mark.parametrize("case", cases(*USUAL, rest=[case for case in AROUND_REBUILDING if case not in USUAL]))
def test_a_loss_around_the_rebuilding_of_buckets(case):
    """DDP rebuilds its buckets after the first backward; every step must be summed in the order that it has alone."""
    more, lingering, faults = AROUND_REBUILDING[case]
    args = ("--steps", "4", "--depth", "6", *more)
    expected = undisturbed(*(arg for arg in args if arg != "--wait-free"), nproc=3)
    late = ("--meet-after", "0", "--linger", *map(str, lingering)) if lingering else ()
    job = run_job(*args, *late, nproc=3, spares=len(faults), faults=faults)
    assert job.code == 0, job.output
    assert len(job.events("worker_lost")) == len(faults), job.output
    assert job.digests() == expected.digests(), job.output
    between = {event["rank"] for event in job.events("woken") if event["error"] is None and event["step"] == 1}
    assert between >= set(lingering)


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
        # a forked one has started before it could be stopped; a slow disk may keep one waiting for a second
        flags = ("--dead-after", "3", "--start-method", "spawn")
        job = check("--steps", "5", nproc=2, faults=faults, deaths=2, flags=flags, log_dir=tmp_path)
    finally:
        done.set()
        thread.join()
    assert "while it started" in job.output
