"""One of the agents leads: it alone says which hosts are lost.

Whoever gets the key ``leader`` under its own lease leads until that lease ends; then another gets it. The world counts
the leaders, so that one that was stopped and believes that it still leads is not listened to. What makes a host lost is
a fact in the store (the lease on its place has ended), so a new leader finds whatever the old one has missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable

from regrow.agent.happenings import Led, Lost, NodeLost
from regrow.agent.store import ControlStore, Lease
from regrow.agent.world import World

LEADER_KEY = "leader"
WORLD_KEY = "world"
HOSTS = "host/"
_TOGETHER_S = 0.05  # hosts that fail together should cost one generation; a process takes a moment to end


class Leader:
    """``run`` campaigns, then leads. ``apply`` changes the world, ``report`` takes what is found."""

    def __init__(
        self,
        store: ControlStore,
        lease: Lease | None,
        node: int,
        session: str,
        *,
        look_every_s: float,
        apply: Callable[[Led], Awaitable[World]],
        report: Callable[[Lost], None],
        why: Callable[[int, str], str],
    ) -> None:
        self._store = store
        self._lease = lease
        self._node = node
        self._session = session
        self._look_every_s = look_every_s
        self._apply = apply
        self._report = report
        self._why = why
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Never returns. ``StoreLost`` or ``LeaseLost`` when this session is over."""
        await self._campaign()
        world = await self._apply(Led(self._node, self._session, time.time()))
        if world.leader != self._session:
            return  # the run is over, or this host is no member
        watching = asyncio.create_task(self._watch(HOSTS))
        try:
            while not watching.done():
                await self._look(world.epoch)
                await self._change()  # or none: who joined and was gone before the world knew of it left no later one
                await asyncio.sleep(_TOGETHER_S)
            watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _campaign(self) -> None:
        session = self._session.encode()
        watching = asyncio.create_task(self._watch(LEADER_KEY))
        try:
            while await self._store.compare_and_set(LEADER_KEY, 0, session, self._lease) is None:
                known = await self._store.get(LEADER_KEY)
                if known is not None and known.value == session:
                    return
                if watching.done():
                    watching.result()
                await self._change()  # the key may have gone before the watch began: it is tried after a while, too
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _change(self) -> None:
        """Wait for one, but not for long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._look_every_s):  # not ``wait_for``: in 3.11 it may lose a cancellation
                await self._changed.wait()
        self._changed.clear()

    async def _watch(self, prefix: str) -> None:
        try:
            async for _ in self._store.watch(prefix):
                self._changed.set()
        finally:
            self._changed.set()

    async def _look(self, epoch: int) -> None:
        """Compare who should be there with who is. The store is asked, not the watch: it may be behind the world."""
        entry = await self._store.get(WORLD_KEY)
        if entry is None:
            return
        world, lost = World.loads(entry.value), []
        for node, one in world.nodes.items():
            if one.alive and one.session != self._session:
                place = await self._store.get(f"{HOSTS}{node}")
                if place is None or json.loads(place.value)["session"] != one.session:
                    lost.append(NodeLost(node, one.session, self._why(node, one.session)))
        if lost and not world.over:
            self._report(Lost((), time.time(), tuple(lost), epoch))
