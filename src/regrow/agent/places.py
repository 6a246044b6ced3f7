"""Bring the nodes of a run together by a store that none of them hosts. Everyone does the same and nobody leads.

A node takes a place, ``node/<n>``, under a lease that it renews until it leaves. When all places are taken each node
says so, which one that has died meanwhile cannot. Whoever sees that all have may write down what the run looks like:
compare-and-set lets one do so. From then on an empty place is a lost node.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from regrow.agent.options import RunOptions, StartError
from regrow.agent.store import ControlStore, Lease, LeaseLost, StoreLost
from regrow.agent.world import World

WORLD_KEY = "world"
RUN_KEY = "run"
_NODES = "node/"
_POLL_S = 0.2


class Places:
    """This node's place in a run and what it sees of the others'. ``on_gone(node)`` is called once for each loss."""

    def __init__(self, options: RunOptions, store: ControlStore, ttl_s: float, on_gone: Callable[[int], None]) -> None:
        self._options = options
        self._store = store
        self._ttl_s = ttl_s
        self._on_gone = on_gone
        self._id = uuid.uuid4().hex
        self._lease: Lease | None = None
        self._node = -1
        self._nodes: dict[int, dict[str, Any]] = {}
        self._run: dict[str, Any] | None = None
        self._places: list[str] = []
        self._reported: set[int] | None = None
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def gather(self, address: str, port: int) -> tuple[int, dict[str, Any]]:
        """Take a place and wait for the others; return its number and what was agreed on."""
        options = self._options
        about = {"id": self._id, "nproc": options.nproc, "nnodes": options.nnodes, "addr": address, "port": port}
        try:
            async with asyncio.timeout(options.join_timeout_s):
                await self._wait_for_the_last_run()
                self._lease = await self._store.grant(self._ttl_s)
                self._start(self._keep())
                self._node = await self._take(json.dumps(about).encode())
                self._start(self._follow_nodes())
                following = self._start(self._follow_run())
                run = await self._agree(about)
                following.cancel()
                return self._node, run
        except TimeoutError:
            sentence = self._who_is_missing()
            with contextlib.suppress(LeaseLost):
                await self._call_off(sentence)
            raise StartError(sentence) from None
        except LeaseLost:
            raise StartError("this node lost its place while joining: it could not renew its lease in time") from None

    @property
    def cut_off(self) -> bool:
        """Whether the store was lost, so that nothing can be said to it any more."""
        return isinstance(self._failure, StoreLost)

    async def leave(self) -> None:
        """Give the place up; the last one out deletes what the run has left."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreLost, LeaseLost):
            if self._lease is not None:
                await self._lease.revoke()
            if self._places:
                await self._clear()

    # ------------------------------------------------------------------ before the run

    async def _wait_for_the_last_run(self) -> None:
        """A run of the same name may still be ending, or may have ended without a chance to clear up."""
        while await self._store.get(RUN_KEY) is not None:
            await self._clear()
            await asyncio.sleep(_POLL_S)

    async def _clear(self) -> None:
        """Delete what a run without nodes has left, if nobody else does; its name is free when that is done."""
        entry = await self._store.get(RUN_KEY)  # before the nodes: if there are none, this run can have no more
        if entry is None or "places" not in json.loads(entry.value) or await self._store.keys(_NODES):
            return
        lease = await self._store.grant(self._ttl_s)
        if await self._store.compare_and_set(RUN_KEY, entry.version, b'{"clearing": true}', lease) is not None:
            await self._wipe(lease)
        await lease.revoke()

    async def _wipe(self, lease: Lease) -> None:
        for part in sorted({key.partition("/")[0] for key in await self._store.keys("")} - {"node", RUN_KEY}):
            if not await lease.keep():
                raise LeaseLost("the lease is over")
            await self._store.delete(part, prefix=True)

    async def _take(self, info: bytes) -> int:
        options, loop = self._options, asyncio.get_running_loop()
        places = range(options.nnodes) if options.node_rank is None else [options.node_rank]
        assert self._lease is not None
        until = loop.time() + self._lease.ttl_s + 2 * _POLL_S  # by then a predecessor that was killed is forgotten
        while loop.time() < until:
            for node in places:
                if await self._store.compare_and_set(f"{_NODES}{node}", 0, info, self._lease) is not None:
                    return node
            await asyncio.sleep(_POLL_S)
        taken = f"node rank {options.node_rank} is" if options.node_rank is not None else f"all {options.nnodes} are"
        raise StartError(f"this node cannot join: {taken} already taken")

    async def _agree(self, about: dict[str, Any]) -> dict[str, Any]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            if self._run is None:
                if (sentence := self._what_differs()) is not None:
                    await self._call_off(sentence)
                elif len(self._nodes) == self._options.nnodes:
                    everyone = [self._nodes[node]["id"] for node in range(self._options.nnodes)]
                    if about.get("sees") != everyone:
                        about["sees"] = everyone
                        await self._store.put(f"{_NODES}{self._node}", json.dumps(about).encode(), self._lease)
                    elif all(info.get("sees") == everyone for info in self._nodes.values()):
                        await self._begin()
            elif "error" in self._run:
                raise StartError(self._run["error"])
            elif "places" in self._run:
                self._places = self._run["places"]
                if self._places[self._node] != self._id:
                    raise LeaseLost("another node has this place")
                return self._run

    async def _begin(self) -> None:
        """Say what the run looks like, if nobody else does; one that dies here leaves that to the others."""
        assert self._lease is not None
        nodes = [self._nodes[node] for node in range(self._options.nnodes)]
        version = await self._store.compare_and_set(RUN_KEY, 0, b'{"starting": true}', self._lease)
        if version is None:
            return
        await self._wipe(self._lease)
        run = {
            "run_id": self._options.run_id,
            "nprocs": [info["nproc"] for info in nodes],
            "places": [info["id"] for info in nodes],
            "master_addr": nodes[0]["addr"],
            "master_port": nodes[0]["port"],
        }
        world = World.first(sum(run["nprocs"]), self._options.max_restarts, time.time())
        await self._store.put(WORLD_KEY, world.dumps())
        await self._store.compare_and_set(RUN_KEY, version, json.dumps(run).encode())

    async def _call_off(self, sentence: str) -> None:
        """Tell those who wait. It hangs on the lease, so that it is not in the way of the next run."""
        with contextlib.suppress(StoreLost):
            await self._store.compare_and_set(RUN_KEY, 0, json.dumps({"error": sentence}).encode(), self._lease)

    def _what_differs(self) -> str | None:
        mine = self._options.nnodes
        for node, info in self._nodes.items():
            if info["nnodes"] != mine:
                return f"node {node} was started with --nnodes {info['nnodes']}, node {self._node} with {mine}"
        return None

    def _who_is_missing(self) -> str:
        waited = f"within {self._options.join_timeout_s:g} s"
        if self._lease is None:
            return f"an earlier run with --rdzv-id {self._options.run_id} did not end {waited}"
        missing = ", ".join(str(node) for node in range(self._options.nnodes) if node not in self._nodes)
        return f"only {len(self._nodes)} of {self._options.nnodes} nodes joined {waited} (missing: node {missing})"

    # ------------------------------------------------------------------ from then on

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except Exception as error:  # noqa: BLE001  whoever waits for the others raises it; later the agent notices
                self._failure = error
                self._changed.set()

        task = asyncio.create_task(guarded())
        self._tasks.append(task)
        return task

    async def _keep(self) -> None:
        assert self._lease is not None
        while True:
            await asyncio.sleep(self._lease.ttl_s / 3)
            kept = await self._lease.keep()
            if not kept:
                self._nodes.pop(self._node, None)
            if self._places and self._reported is None:
                self._reported = set()  # only now does the agent listen, for certain
            self._report_losses()
            if not kept:
                raise LeaseLost("the lease is over")

    async def _follow_nodes(self) -> None:
        async for change in self._store.watch(_NODES):
            node = int(change.key.removeprefix(_NODES))
            if change.value is not None:
                self._nodes[node] = json.loads(change.value)
            else:
                self._nodes.pop(node, None)
                if node == self._node and not self._places:
                    raise LeaseLost("the lease is over")
            self._changed.set()
            self._report_losses()

    def _report_losses(self) -> None:
        if self._reported is None:
            return
        for node, known in enumerate(self._places):
            if node not in self._reported and self._nodes.get(node, {}).get("id") != known:
                self._reported.add(node)
                self._on_gone(node)

    async def _follow_run(self) -> None:
        async for change in self._store.watch(RUN_KEY):
            if change.key == RUN_KEY:
                self._run = None if change.value is None else json.loads(change.value)
                self._changed.set()
                if self._run is not None and "error" in self._run:
                    return  # it vanishes with whoever wrote it
