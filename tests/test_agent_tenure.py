"""How long a host may hold ranks, and who says that another may not: without processes."""

import asyncio
import json
import time

from regrow.agent.happenings import Lost, NodeLost
from regrow.agent.leader import HOSTS, WORLD_KEY, Leader
from regrow.agent.membership import decide
from regrow.agent.store import MemoryStore, StoreLost
from regrow.agent.tenure import Tenure
from regrow.agent.world import Node, World
from regrow.fence import Fence

TTL_S = 0.6


def run(test):
    async def main():
        async with asyncio.timeout(20):
            await test()

    asyncio.run(main())


class FakeLease:
    """``keep`` does what it is told: a value to return, an exception, or None for no answer at all."""

    ttl_s = TTL_S

    def __init__(self, *answers):
        self.answers = list(answers)
        self.kept = 0

    async def keep(self):
        answer = self.answers.pop(0) if self.answers else True
        if answer is None:
            await asyncio.sleep(60)
        if isinstance(answer, Exception):
            raise answer
        self.kept += 1
        return answer

    async def revoke(self):
        pass


def test_a_lease_that_is_renewed_lasts(tmp_path):
    async def check():
        fence = Fence.create(tmp_path)
        tenure = Tenure(FakeLease(), time.monotonic())
        tenure.tell(fence.move)
        first = Fence(tmp_path).until_t
        await asyncio.sleep(2 * TTL_S)
        assert tenure.valid and tenure.lease.kept >= 3
        assert first < time.monotonic() < Fence(tmp_path).until_t <= time.monotonic() + TTL_S
        await tenure.close()
        assert not tenure.valid

    run(check)


def test_it_is_over_before_the_store_gives_the_ranks_away_if_no_answer_comes():
    async def check():
        began = time.monotonic()
        tenure = Tenure(FakeLease(None), began)
        assert "did not answer" in await tenure.over
        assert time.monotonic() - began < TTL_S
        tenure = Tenure(FakeLease(True, None), time.monotonic())
        await tenure.over
        assert tenure.lease.kept == 1

    run(check)


def test_it_is_over_at_once_when_the_store_says_so_or_is_lost():
    async def check():
        assert await Tenure(FakeLease(False), time.monotonic()).over == "its lease has expired"
        assert await Tenure(FakeLease(StoreLost("gone")), time.monotonic()).over == "gone"

    run(check)


def test_after_standing_still_it_is_not_valid_before_anything_else_happens():
    async def check():
        tenure = Tenure(FakeLease(), time.monotonic())
        await asyncio.sleep(0)
        time.sleep(1.2 * TTL_S)  # as if the process had been stopped
        assert not tenure.valid
        assert "stood still" in await tenure.over

    run(check)


def test_the_host_of_the_store_needs_no_lease():
    async def check():
        tenure = Tenure.unlimited()
        assert tenure.valid
        await tenure.close()

    run(check)


class Host:
    """A host's part in leading: its lease, its place, and what it reports."""

    def __init__(self, store, node):
        self.store, self.node, self.session = store, node, chr(97 + node)
        self.reported = []

    async def come(self):
        self.lease = await self.store.grant(60.0)
        await self.store.put(f"{HOSTS}{self.node}", json.dumps({"session": self.session}).encode(), self.lease)
        leader = Leader(
            self.store,
            self.lease,
            self.node,
            self.session,
            look_every_s=5.0,
            apply=self.apply,
            report=self.report,
            why=lambda node, session: "silent",
        )
        self.leading = asyncio.create_task(leader.run())

    async def apply(self, event):
        while True:
            entry = await self.store.get(WORLD_KEY)
            world = decide(World.loads(entry.value), event).world
            if await self.store.compare_and_set(WORLD_KEY, entry.version, world.dumps()) is not None:
                return world

    def report(self, lost):
        self.reported.append(lost)
        self.task = asyncio.create_task(self.apply(lost))

    async def die(self):
        """As a host does: at once, and known to the others by its lease only."""
        self.leading.cancel()
        await self.lease.revoke()


async def until(condition):
    while not await condition():
        await asyncio.sleep(0.01)


def test_one_leads_and_when_it_is_lost_another_says_so():
    async def check():
        store = MemoryStore()
        await store.put(WORLD_KEY, World.first([1, 1, 1], 9, 0.0, [Node(name, 1) for name in "abc"]).dumps())

        async def world():
            return World.loads((await store.get(WORLD_KEY)).value)

        async def led_by(session):
            return (await world()).leader == session

        async def alive(*nodes):
            return tuple(node for node, one in (await world()).nodes.items() if one.alive) == nodes

        hosts = [Host(store, node) for node in range(3)]
        for host in hosts:
            await host.come()
        await until(lambda: led_by("a"))
        await hosts[2].die()
        await until(lambda: alive(0, 1))
        assert [lost.nodes[0].node for lost in hosts[0].reported] == [2]
        assert not hosts[1].reported
        await hosts[0].die()
        await until(lambda: alive(1))
        assert (await world()).epoch == 2 and (await world()).leader == "b"
        assert [lost.epoch for lost in hosts[1].reported] == [2]
        before = await world()
        stale = Lost((), 0.0, (NodeLost(1, "b", "said by one that led once"),), epoch=1)
        assert decide(before, stale).world is before
        hosts[1].leading.cancel()

    run(check)


def test_hosts_that_are_lost_together_are_found_together():
    async def check():
        store = MemoryStore()
        await store.put(WORLD_KEY, World.first([1, 1, 1], 9, 0.0, [Node(name, 1) for name in "abc"]).dumps())
        hosts = [Host(store, node) for node in range(3)]
        for host in hosts:
            await host.come()
        await asyncio.sleep(0.1)
        await hosts[1].die()
        await hosts[2].die()

        async def reported():
            return hosts[0].reported

        await until(reported)
        assert [one.node for one in hosts[0].reported[0].nodes] == [1, 2]
        hosts[0].leading.cancel()

    run(check)
