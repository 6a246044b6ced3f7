"""Ranks are killed, stopped, late or forked: the others wake, and the groups work again with a replacement."""

from __future__ import annotations

import atexit
import os
import random
import signal
import socket
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from regrow.ddp import Buckets
from regrow.errors import PeerLost, SetupDiverged, Superseded
from regrow.group import Mode
from regrow.group.meeting import MeetingStore
from regrow.group.sockets import parse_listener
from test_group_world import WAIT_S, world  # noqa: F401 (a fixture)

SIZE = 3
VICTIM = 2
WOKEN_S = 8.0  # gloo's own time-out is WAIT_S: whoever wakes before this was woken


class _Job:
    """What a user's set-up makes: groups, objects, a wrapped model. The same calls in each process of a rank."""

    def __init__(self, member):
        member.init()
        self.rank = member.rank
        self.groups = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [1, 2])]
        choice = [{"seed": 11 if member.rank == 0 else None}]
        dist.broadcast_object_list(choice, 0)
        torch.manual_seed(choice[0]["seed"])
        dist.barrier()
        self.model = DistributedDataParallel(nn.Linear(200, 200))  # more than 64 KB: not in the record

    def check(self):
        """Use every group, and the model; return what must be the same on all ranks."""
        total = torch.tensor([float(self.rank)])
        dist.all_reduce(total)
        for group, ranks in zip(self.groups, ([0, 1], [0, 2], [1, 2]), strict=True):
            if self.rank in ranks:
                part = torch.ones(1)
                dist.all_reduce(part, group=group)
                assert part.item() == 2
        everyone = [None] * SIZE
        dist.all_gather_object(everyone, self.rank)
        assert everyone == [0, 1, 2]
        return total.item()


def _block(kind, job):
    """Block on a dead or on a silent live peer, in many ways."""
    match kind:
        case "all_reduce" | "stopped":
            dist.all_reduce(torch.ones(1000))
        case "large":
            dist.all_reduce(torch.ones(4_000_000))
        case "recv from a live peer":
            dist.recv(torch.ones(3), 1 - job.rank)
        case "barrier":
            dist.barrier()
        case "subgroup":
            if job.rank == 0:
                dist.all_reduce(torch.ones(10), group=job.groups[0])  # its other member does not come
            else:
                dist.all_reduce(torch.ones(10), group=job.groups[2])
        case "async":
            dist.all_reduce(torch.ones(10), async_op=True).wait()
        case "backward":
            job.model(torch.ones(2, 200)).sum().backward()


def _survive(member):
    fabric = member.weave()
    job = _Job(member)
    member.say("record", fabric.seal())
    while True:
        order = member.hear("order")
        if order is None:
            break
        kind, generation = order
        member.say("blocking")
        with pytest.raises(RuntimeError):
            _block(kind, job)
        woke_at = time.monotonic()
        member.hear("aborted")  # the failure may have shown by itself, before the test told of it
        with pytest.raises(PeerLost):
            dist.all_reduce(torch.ones(1))
        assert not fabric.intact()
        member.say("woke", woke_at)
        member.reconnect(generation)
        assert fabric.intact()
        member.say("healed", job.check())
    dist.destroy_process_group()


def _replace(member, generation, record):
    fabric = member.weave(Mode.REPLAYING, generation, record)
    job = _Job(member)
    fabric.go_live()
    member.reconnect(generation)
    member.say("healed", job.check())
    _survive_on(member, job)


def _survive_on(member, job):
    while member.hear("order") is not None:
        member.say("blocking")
        while True:
            time.sleep(1)  # the victim: it comes to nothing and waits for its end


KINDS = ["all_reduce", "large", "recv from a live peer", "barrier", "subgroup", "async", "backward", "stopped"]


def test_everyone_wakes_and_heals_with_a_replacement(world):  # noqa: F811
    survivors = [world.start(_survive, rank, SIZE) for rank in range(2)]
    victim = world.start(_victim, VICTIM, SIZE)
    for worker in survivors:
        worker.hear("record")
    record = victim.hear("record")
    for generation, kind in enumerate(KINDS, start=1):
        for worker in (*survivors, victim):
            worker.tell("order", (kind, generation))
        for worker in (*survivors, victim):
            worker.hear("blocking")
        time.sleep(0.1)  # let them get into gloo; if they do not, the test is easier but not wrong
        if kind == "stopped":
            victim.signal(signal.SIGSTOP)
        else:
            victim.kill()
        told_at = time.monotonic()
        for worker in survivors:
            worker.tell("abort", generation)
            worker.tell("aborted")
        woke_after = [worker.hear("woke") - told_at for worker in survivors]
        print(f"{kind}: woke {[f'{1000 * s:.0f} ms' for s in woke_after]} after the abort")
        assert max(woke_after) < WOKEN_S
        if kind == "stopped":
            victim.kill()
        victim = world.start(_replace, VICTIM, SIZE, generation, record)
        for worker in (*survivors, victim):
            assert worker.hear("healed") == 3.0
    for worker in (*survivors, victim):
        worker.tell("order", None)
    for worker in (*survivors, victim):
        worker.finish()


def _spin(member):
    """Send and receive small things without a pause, generation after generation."""
    fabric = member.weave()
    member.init()
    fabric.seal()
    model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 64)), bucket_cap_mb=0.001)
    buckets = Buckets(model, fabric)
    while (generation := member.hear("go")) is not None:
        member.say("spinning")
        with suppress(RuntimeError):
            while True:
                model(torch.ones(2, 64)).sum().backward()  # buffers are broadcast, gradients summed
                dist.broadcast(torch.ones(4), 1)
        member.hear("aborted")
        member.say("woke", time.monotonic())
        buckets.abandon()  # some may have rebuilt theirs, some not
        member.reconnect(generation)


def test_no_operation_is_forgotten(world):  # noqa: F811
    """gloo drops a message whose connection breaks in the moment in which it begins to be written; we must not."""
    workers = world.start_all(_spin, SIZE)
    dice = random.Random(0)
    slowest = 0.0
    for generation in range(1, 61):
        for worker in workers:
            worker.tell("go", generation)
        for worker in workers:
            worker.hear("spinning")
        time.sleep(dice.uniform(0, 0.03))
        told_at = time.monotonic()
        for worker in workers:
            worker.tell("abort", generation)
            worker.tell("aborted")
        slowest = max(slowest, *(worker.hear("woke") - told_at for worker in workers))
    print(f"the slowest woke {1000 * slowest:.0f} ms after the abort")
    assert slowest < WOKEN_S
    for worker in workers:
        worker.tell("go", None)
        worker.finish()


def _victim(member):
    fabric = member.weave()
    job = _Job(member)
    member.say("record", fabric.seal())
    _survive_on(member, job)


def _reconnect_until_healed(member):
    """Join generation after generation, as told, until one holds."""
    fabric = member.weave()
    job = _Job(member)
    member.say("record", fabric.seal())
    member.hear("go")
    outcomes = []
    generation = 1
    while True:
        asked = time.monotonic()
        try:
            member.reconnect(generation)
            break
        except (Superseded, PeerLost) as error:  # lost, if the peer's end shows before the news of it
            assert error.generation == generation
            outcomes.append(time.monotonic() - asked)
        while member.newest == generation:
            assert time.monotonic() < asked + WAIT_S
            time.sleep(0.001)
        generation = member.newest
    member.say("healed", job.check())
    member.say("outcomes", (generation, outcomes))


def _ends_after_publishing(member, generation, record, number):
    """A replacement that is killed, or stopped for good, between publishing its address and connecting."""
    fabric = member.weave(Mode.REPLAYING, generation, record)
    _Job(member)
    fabric.go_live()

    def get(store, key):
        member.say("published")
        os.kill(os.getpid(), number)

    MeetingStore.get = get
    member.reconnect(generation)


@pytest.mark.parametrize(
    "how", ["never comes", "dies after publishing", "stops after publishing", "dies once connected"]
)
def test_a_second_death_during_the_reconnection_starts_it_over(world, how):  # noqa: F811
    survivors = [world.start(_reconnect_until_healed, rank, SIZE) for rank in range(2)]
    victim = world.start(_victim, VICTIM, SIZE)
    for worker in survivors:
        worker.hear("record")
    record = victim.hear("record")
    victim.kill()
    if how == "dies once connected":
        survivors[1].tell("go")  # and rank 0 does not come: both wait for it, and one of them is killed
        second = world.start(_replace, VICTIM, SIZE, 1, record)
        time.sleep(0.3)
        second.kill()
        for worker in survivors:
            worker.tell("abort", 2)
        survivors[0].tell("go")
    else:
        for worker in survivors:
            worker.tell("go")
        if how != "never comes":
            number = signal.SIGKILL if how == "dies after publishing" else signal.SIGSTOP
            world.start(_ends_after_publishing, VICTIM, SIZE, 1, record, number).hear("published")
        time.sleep(0.2)
        for worker in survivors:
            worker.tell("abort", 2)
    last = world.start(_replace, VICTIM, SIZE, 2, record)
    for worker in (*survivors, last):
        assert worker.hear("healed") == 3.0
    for worker in survivors:
        generation, outcomes = worker.hear("outcomes")
        assert generation == 2
        assert all(seconds < WOKEN_S for seconds in outcomes)
        worker.finish()
    last.tell("order", None)
    last.finish()


def _old_and_new(member):
    fabric = member.weave()
    member.init()
    fabric.seal()
    fabric.abort("exercise")
    if member.rank == VICTIM:
        with pytest.raises(TimeoutError):
            member.reconnect(1, wait_s=0.5)
    member.newest = 2
    member.reconnect(2)
    dist.barrier()
    member.say("formed")
    member.hear("stranger came")
    assert fabric.intact()
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [3.0, 3.0]


def _stranger(member):
    """A rank that is still at generation 1 and finds the listeners of generation 2 under its addresses."""
    fabric = member.weave(Mode.LIVE, generation=1, connect_timeout_s=1.0)
    with pytest.raises((PeerLost, TimeoutError)):
        member.init()
    fabric.close()


def test_nothing_of_an_older_generation_is_taken(world):  # noqa: F811
    workers = world.start_all(_old_and_new, SIZE)
    for worker in workers:
        worker.hear("formed")
    for rank in range(SIZE):  # as if the kernel had given the old ports to the new listeners
        world.server.set(f"gen1/0/0/{rank}", world.server.get(f"gen2/0/0/{rank}"))
    for rank in range(SIZE):  # whose group is formed: nobody else finds its port any more
        with socket.socket() as stranger, pytest.raises(TimeoutError):
            stranger.settimeout(0.3)
            stranger.connect(parse_listener(world.server.get(f"gen2/0/0/{rank}")))
    world.start(_stranger, VICTIM, SIZE).finish()
    for worker in workers:
        worker.tell("stranger came")
    for worker in workers:
        worker.finish()


def _forks(member):
    fabric = member.weave()
    member.init()
    fabric.seal()
    dist.barrier()
    if member.rank == VICTIM:
        child = os.fork()
        if child == 0:
            with pytest.raises(PeerLost):
                dist.all_reduce(torch.ones(1))
            atexit._run_exitfuncs()  # as at its end: the groups are not its own to destroy
            member.say("child", (os.getpid(), dist.is_initialized()))
            time.sleep(WAIT_S)
            os._exit(0)
    member.hear("go")
    with pytest.raises(RuntimeError):  # no one aborts: the killed rank's connections must end by themselves
        while True:
            dist.all_reduce(torch.ones(1))
    member.say("noticed", time.monotonic())
    assert not fabric.intact()


def test_a_forked_child_does_not_hide_the_death_of_its_parent(world):  # noqa: F811
    workers = world.start_all(_forks, SIZE)
    child, left_alone = workers[VICTIM].hear("child")
    try:
        assert left_alone
        for worker in workers:
            worker.tell("go")
        time.sleep(0.2)
        workers[VICTIM].kill()
        killed_at = time.monotonic()
        os.kill(child, 0)  # it is still there
        for worker in workers[:2]:
            assert worker.hear("noticed") - killed_at < WOKEN_S
            worker.finish()
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _diverges(member):
    fabric = member.weave()
    member.init()
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(4))
    record = fabric.seal()
    dist.destroy_process_group()
    fabric.close()
    said = []
    others = (
        lambda _: dist.broadcast(torch.ones(4), 0),
        lambda _: dist.all_reduce(torch.ones(5)),
        lambda _: dist.all_reduce(torch.ones(4, dtype=torch.int32)),
        lambda _: (dist.all_reduce(torch.ones(4)), dist.barrier()),
        lambda early: early.go_live(),
    )
    for other in others:
        fabric = member.weave(Mode.REPLAYING, record=record)
        member.init()
        dist.all_reduce(torch.ones(3))
        with pytest.raises(SetupDiverged) as caught:
            other(fabric)
        said.append(str(caught.value))
        dist.destroy_process_group()
        fabric.close()
    member.say("said", said)


def test_a_set_up_that_differs_is_told_how(world):  # noqa: F811
    workers = world.start_all(_diverges, 2)
    for worker in workers:
        said = worker.hear("said")
        assert "had allreduce of [['float32', [4]]], but broadcast of [['float32', [4]]] came" in said[0]
        assert "allreduce of [['float32', [5]]] came" in said[1]
        assert "allreduce of [['int32', [4]]] came" in said[2]
        assert "barrier came, but the first set-up had only 2 operations" in said[3]
        assert "{'0': 1}" in said[4]
        worker.finish()
