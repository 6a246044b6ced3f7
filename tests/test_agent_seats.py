"""Hosts that meet in a store which none of them has."""

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from regrow.agent.happenings import Exited
from regrow.agent.leader import HOSTS, WORLD_KEY
from regrow.agent.membership import decide
from regrow.agent.options import RunOptions, StartError
from regrow.agent.remains import RUN_KEY, clear, forget_the_last
from regrow.agent.seats import CannotReturn, retake, sit
from regrow.agent.store import LeaseLost, MemoryStore
from regrow.agent.tenure import Tenure
from regrow.agent.world import Node, World

OPTIONS = RunOptions(
    command=("x",),
    token="t",
    log_dir=Path(),
    nnodes=2,
    run_id="r",
    join_timeout_s=20.0,
    dead_after_s=0.6,
    store=(("etcd", 1),),
)


class Host:
    def __init__(self, store, **options):
        self.options = dataclasses.replace(OPTIONS, **options)
        self.joining = asyncio.create_task(self._join(store))

    async def _join(self, store):
        await forget_the_last(store, 1.0)
        self.tenure = await Tenure.begin(store, self.options.dead_after_s)
        return await sit(self.options, store, self.tenure, "10.0.0.1")

    async def die(self):
        self.joining.cancel()
        await asyncio.gather(self.joining, return_exceptions=True)
        await self.tenure.close()


def run(test):
    async def main():
        async with asyncio.timeout(30):
            await test(MemoryStore())

    asyncio.run(main())


async def world_of(store):
    return World.loads((await store.get(WORLD_KEY)).value)


def test_all_agree_and_a_standby_is_not_of_the_world():
    async def check(store):
        standby = Host(store, standby=True)
        await asyncio.sleep(0.05)
        hosts = [Host(store, nproc=number + 1, max_slots=4) for number in range(2)]
        sites = [await host.joining for host in (*hosts, standby)]
        assert sorted(site.node for site in sites[:2]) == [0, 1] and sites[2].node == 2
        assert len({(site.birth, site.nprocs, site.master_addr, site.master_port) for site in sites}) == 1
        world = await world_of(store)
        assert sum(sites[0].nprocs) == 3
        assert {one.session for one in world.nodes.values()} == {site.session for site in sites[:2]}
        assert [one.slots for one in world.nodes.values()] == [4, 4]
        late = await Host(store, nnodes=2, max_nodes=4).joining
        assert late.node == 3, "what comes later is a standby, too"
        with pytest.raises(StartError, match="all 4 are already taken"):
            await Host(store, nnodes=2, max_nodes=4).joining

    run(check)


def test_a_place_is_free_again_when_whoever_took_it_died_before_the_run():
    async def check(store):
        first = Host(store, node_rank=1)
        while not await store.keys(HOSTS):
            await asyncio.sleep(0.01)
        await first.die()
        hosts = [Host(store, node_rank=rank) for rank in (1, 0)]
        assert [(await host.joining).node for host in hosts] == [1, 0]

    run(check)


class Dying(MemoryStore):
    """Whoever writes the first world dies of it, once."""

    deaths = 0

    async def compare_and_set(self, key, version, value, lease=None):
        if key == WORLD_KEY and not self.deaths:
            self.deaths += 1
            raise RuntimeError("killed")
        return await super().compare_and_set(key, version, value, lease)


def test_whoever_begins_the_run_may_die_of_it():
    async def check(_):
        store = Dying()
        hosts = [Host(store) for _ in range(2)]
        done, _ = await asyncio.wait([host.joining for host in hosts], return_when=asyncio.FIRST_COMPLETED)
        (dead,) = (host for host in hosts if host.joining in done)
        await dead.die()
        (living,) = (host for host in hosts if host is not dead)
        third = Host(store)
        assert sorted([(await living.joining).node, (await third.joining).node]) == [0, 1]

    run(check)


class Slow(MemoryStore):
    """Whoever writes the first world stands still before it, until another has begun the run and trains."""

    late = None

    async def compare_and_set(self, key, version, value, lease=None):
        if key == WORLD_KEY and self.late is None:
            self.late = asyncio.Event()
            await self.late.wait()
        return await super().compare_and_set(key, version, value, lease)


def test_whoever_begins_the_run_too_late_overwrites_nothing():
    async def check(_):
        store = Slow()
        hosts = [Host(store) for _ in range(2)]
        while store.late is None:
            await asyncio.sleep(0.01)
        await store.delete(RUN_KEY)  # as with the lease of whoever stands still
        while (entry := await store.get(WORLD_KEY)) is None:
            await asyncio.sleep(0.01)
        store.late.set()
        ends = await asyncio.gather(*(host.joining for host in hosts), return_exceptions=True)
        assert sum(isinstance(end, LeaseLost) for end in ends) == 1, ends
        assert (await store.get(WORLD_KEY)).version == entry.version
        for host in hosts:
            await host.die()

    run(check)


def test_place_taken_and_places_missing_and_numbers_that_differ():
    async def check(store):
        first, again = Host(store, node_rank=0, join_timeout_s=2.0), Host(store, node_rank=0)
        with pytest.raises(StartError, match="node rank 0 is already taken"):
            await again.joining
        with pytest.raises(StartError, match=r"only 1 of 2 nodes joined within 2 s \(missing: node 1\)"):
            await first.joining
        for host in (first, again):
            await host.tenure.close()
        hosts = [Host(store, node_rank=0, nnodes=3), Host(store, node_rank=1), Host(store, node_rank=2, nnodes=3)]
        for host in hosts:
            with pytest.raises(StartError, match=r"node \d was started with --nnodes \d, node \d with \d"):
                await host.joining

    run(check)


def test_who_comes_back_has_its_place_unless_it_was_taken():
    async def check(store):
        hosts = [Host(store, node_rank=rank) for rank in (0, 1)]
        sites = [await host.joining for host in hosts]
        await hosts[1].tenure.close()
        back = await retake(OPTIONS, sites[1], store)
        assert back.node == 1 and back.session != sites[1].session
        with pytest.raises(CannotReturn, match="another host is node 1 now"):
            await retake(OPTIONS, sites[1], store)
        await store.put(RUN_KEY, json.dumps({"birth": "another"}).encode())
        with pytest.raises(CannotReturn, match="no longer there"):
            await retake(OPTIONS, back, store)

    run(check)


def test_what_a_run_has_left_is_cleared_away_when_no_host_is_there():
    async def check(store):
        over = decide(World.first([1], 9, 0.0, [Node("a", 1)]), Exited(0, 0)).world
        await store.put(RUN_KEY, json.dumps({"birth": "b"}).encode())
        await store.put(WORLD_KEY, over.dumps())
        await store.put("kv/old", b"")
        await store.put(f"{HOSTS}0", b"{}")
        await clear(store, 1.0)
        assert len(await store.keys("")) == 4, "somebody is still there"
        hosts = [Host(store) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert not any(host.joining.done() for host in hosts), "a run that is over is not joined"
        await store.delete(f"{HOSTS}0")
        for host in hosts:
            await host.joining
        assert sorted(await store.keys("")) == [f"{HOSTS}0", f"{HOSTS}1", RUN_KEY, WORLD_KEY]

    run(check)


class Overtaken(MemoryStore):
    """While somebody looks for hosts of the old run, a new one of that name begins."""

    async def keys(self, prefix):
        await self.put(RUN_KEY, b'{"birth": "new"}')
        return await super().keys(prefix)


def test_a_run_that_has_begun_meanwhile_is_not_cleared_away():
    async def check(_):
        store = Overtaken()
        await store.put(RUN_KEY, b'{"birth": "old"}')
        await store.put(WORLD_KEY, b"new")
        await clear(store, 1.0)
        assert (await store.get(RUN_KEY)).value == b'{"birth": "new"}'
        assert await store.get(WORLD_KEY) is not None

    run(check)


def test_a_host_with_another_token_takes_no_place_and_ends():
    async def check(store):
        first = [Host(store, node_rank=node) for node in range(2)]
        await asyncio.gather(*(host.joining for host in first))
        with pytest.raises(StartError, match="this node cannot join: its token is not this run's"):
            await Host(store, token="another", standby=True).joining
        assert sorted(await store.keys(HOSTS)) == [f"{HOSTS}0", f"{HOSTS}1"]
        for host in first:
            await host.die()

    run(check)


def test_a_run_does_not_begin_with_two_tokens():
    async def check(store):
        hosts = [Host(store, node_rank=0), Host(store, node_rank=1, token="another")]
        ends = await asyncio.gather(*(host.joining for host in hosts), return_exceptions=True)
        assert all(
            isinstance(end, StartError) and "was started with another token than node" in str(end) for end in ends
        )
        for host in hosts:
            await host.die()

    run(check)
