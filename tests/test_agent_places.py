"""Nodes that meet in a store which none of them hosts."""

import asyncio
import contextlib
import dataclasses
import json
from pathlib import Path

import pytest

from regrow.agent.options import RunOptions, StartError
from regrow.agent.places import RUN_KEY, WORLD_KEY, Places
from regrow.agent.store import MemoryStore
from regrow.agent.world import World

OPTIONS = RunOptions(command=("x",), token="t", log_dir=Path(), nnodes=2, run_id="r", join_timeout_s=20.0)
TTL_S = 0.5


class Node:
    """One agent's part in it; ``die`` lets it vanish without a word."""

    def __init__(self, store, **options):
        self.gone = []
        self.places = Places(dataclasses.replace(OPTIONS, **options), store, TTL_S, self.gone.append)
        self.joining = asyncio.create_task(self.places.gather("10.0.0.1", 1234))

    async def die(self):
        self.joining.cancel()
        for task in self.places._tasks:
            task.cancel()
        await asyncio.gather(self.joining, *self.places._tasks, return_exceptions=True)


def run(test):
    async def main():
        async with asyncio.timeout(30):
            await test(MemoryStore())

    asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_all_agree_and_the_last_one_clears_up():
    async def check(store):
        nodes = [Node(store, nnodes=3, nproc=number + 1) for number in range(3)]
        results = [await node.joining for node in nodes]
        assert sorted(number for number, _ in results) == [0, 1, 2]
        _, run = results[0]
        assert all(other == run for _, other in results)
        by_place = {number: node for node, (number, _) in zip(nodes, results, strict=True)}
        assert run["nprocs"] == [by_place[place].places._options.nproc for place in range(3)]
        assert (run["master_addr"], run["master_port"], run["run_id"]) == ("10.0.0.1", 1234, "r")
        assert World.loads((await store.get(WORLD_KEY)).value).world_size == 6
        await store.put("kv/left", b"")
        await nodes[0].places.leave()
        assert await store.get(WORLD_KEY) is not None
        await nodes[1].places.leave()
        await nodes[2].places.leave()
        assert await store.keys("") == []

    run(check)


def test_a_lost_node_is_told_of_once():
    async def check(store):
        nodes = [Node(store, node_rank=rank) for rank in (0, 1)]
        for node in nodes:
            await node.joining
        await nodes[1].die()
        await until(lambda: nodes[0].gone)
        await asyncio.sleep(TTL_S)
        assert nodes[0].gone == [1]
        await nodes[0].places.leave()
        assert await store.keys("") == []

    run(check)


def test_whoever_loses_its_own_place_hears_of_it():
    async def check(store):
        nodes = [Node(store, node_rank=rank) for rank in (0, 1)]
        for node in nodes:
            await node.joining
        await nodes[0].places._lease.revoke()
        await until(lambda: nodes[0].gone and nodes[1].gone)
        assert nodes[0].gone == nodes[1].gone == [0]
        for node in nodes:
            await node.places.leave()

    run(check)


def test_a_place_is_free_again_when_whoever_took_it_died_before_the_run():
    async def check(store):
        first = Node(store, node_rank=1)
        while not await store.keys("node/"):
            await asyncio.sleep(0.01)
        await first.die()
        nodes = [Node(store, node_rank=rank) for rank in (1, 0)]
        assert [(await node.joining)[0] for node in nodes] == [1, 0]
        for node in nodes:
            await node.places.leave()

    run(check)


class Dying(MemoryStore):
    """Whoever writes the first world dies of it, once."""

    deaths = 0

    async def put(self, key, value, lease=None):
        if key == WORLD_KEY and not self.deaths:
            self.deaths += 1
            raise RuntimeError("killed")
        return await super().put(key, value, lease)


def test_whoever_begins_the_run_may_die_of_it():
    async def check(_):
        store = Dying()
        nodes = [Node(store) for _ in range(2)]
        done, _ = await asyncio.wait([node.joining for node in nodes], return_when=asyncio.FIRST_COMPLETED)
        (dead,) = (node for node in nodes if node.joining in done)
        with pytest.raises(RuntimeError):
            await dead.joining
        await dead.die()
        third = Node(store)
        (living,) = (node for node in nodes if node is not dead)
        assert sorted([(await living.joining)[0], (await third.joining)[0]]) == [0, 1]
        for node in (living, third):
            await node.places.leave()

    run(check)


def test_what_a_lost_run_of_that_name_left_is_cleared_away():
    async def check(store):
        await store.put(RUN_KEY, json.dumps({"places": ["x", "y"]}).encode())
        await store.put(WORLD_KEY, b"old")
        await store.put("kv/old", b"")
        nodes = [Node(store) for _ in range(2)]
        for node in nodes:
            await node.joining
        assert sorted(await store.keys("")) == ["node/0", "node/1", RUN_KEY, WORLD_KEY]
        for node in nodes:
            await node.places.leave()

    run(check)


def test_a_run_of_that_name_that_goes_on_is_waited_for():
    async def check(store):
        nodes = [Node(store) for _ in range(2)]
        for node in nodes:
            await node.joining
        late = Node(store, join_timeout_s=0.3)
        with pytest.raises(StartError, match=r"an earlier run with --rdzv-id r did not end within 0\.3 s"):
            await late.joining
        successors = [Node(store) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert not any(node.joining.done() for node in successors)
        for node in nodes:
            await node.places.leave()
        for node in successors:
            await node.joining
            assert not node.gone
        for node in successors:
            await node.places.leave()

    run(check)


def test_place_taken_and_places_missing_and_numbers_that_differ():
    async def check(store):
        first, again = Node(store, node_rank=0, join_timeout_s=2.0), Node(store, node_rank=0)
        with pytest.raises(StartError, match="node rank 0 is already taken"):
            await again.joining
        with pytest.raises(StartError, match=r"only 1 of 2 nodes joined within 2 s \(missing: node 1\)"):
            await first.joining
        await first.places.leave()
        await again.places.leave()
        nodes = [Node(store, node_rank=0, nnodes=3), Node(store, node_rank=1), Node(store, node_rank=2, nnodes=3)]
        for node in nodes:
            with pytest.raises(StartError, match=r"node \d was started with --nnodes \d, node \d with \d"):
                await node.joining
        for node in nodes:
            await node.places.leave()
        assert await store.keys("") == []

    run(check)


def test_one_that_waits_hears_why_another_gave_up():
    async def check(store):
        nodes = [Node(store, nnodes=3, node_rank=0, join_timeout_s=0.6), Node(store, nnodes=3, node_rank=1)]
        for node in nodes:
            with pytest.raises(StartError, match=r"only 2 of 3 nodes joined within 0\.6 s \(missing: node 2\)"):
                await node.joining
            with contextlib.suppress(StartError):
                await node.places.leave()

    run(check)


class Overtaken(MemoryStore):
    """While somebody looks for nodes of the old run, a new one of that name begins."""

    async def keys(self, prefix):
        await self.put(RUN_KEY, b'{"places": ["new"]}')
        return await super().keys(prefix)


def test_a_run_that_has_begun_meanwhile_is_not_cleared_away():
    async def check(_):
        store = Overtaken()
        await store.put(RUN_KEY, b'{"places": ["old"]}')
        await store.put(WORLD_KEY, b"new")
        await Places(OPTIONS, store, TTL_S, lambda node: None)._clear()
        assert (await store.get(RUN_KEY)).value == b'{"places": ["new"]}'
        assert await store.get(WORLD_KEY) is not None

    run(check)
