"""Hear of another agent's end at once, where no agent has the store and could see it there.

Each agent is looked at by a few others, the leader by all, and all by the leader. Whoever sees that a process is gone
(``presence`` says what that means) ends its lease: with that its place is free and its leadership over, at once and in
the same way as if the time of the lease had come. A lease belongs to one session, so that this can never hit a
host that has come back meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from regrow.agent.leader import HOSTS, LEADER_KEY
from regrow.agent.presence import until_gone
from regrow.agent.store import ControlStore, StoreLost

_NEIGHBOURS = 4
"""How many the others than the leader look at: were it none, whoever is lost together with the leader would be
noticed when its lease ends."""


@dataclass(frozen=True)
class Place:
    """What a host that can be looked at tells of itself."""

    session: str
    address: str
    port: int
    lease: int

    @staticmethod
    def loads(text: bytes) -> Place | None:
        """Read a place in the store; None if its host cannot be looked at."""
        told = json.loads(text)
        if told.get("presence") is None or told.get("lease") is None:
            return None
        return Place(told["session"], told["address"], int(told["presence"]), int(told["lease"]))


def whom(places: dict[int, Place], own: int, leader: str) -> set[Place]:
    """Return the hosts to look at. Pure: the leader takes all, others the leader and the next few in a ring."""
    others = [places[node] for node in sorted(places) if node > own]
    others += [places[node] for node in sorted(places) if node < own]
    if own in places and places[own].session == leader:
        return set(others)
    return {*others[:_NEIGHBOURS], *(place for place in others if place.session == leader)}


class Lookout:
    """``run`` looks. ``departed(session)`` is told of each agent that is seen to be gone, before anything else is."""

    def __init__(
        self, store: ControlStore, node: int, token: str, patience_s: float, departed: Callable[[str], None]
    ) -> None:
        self._store = store
        self._node = node
        self._token = token
        self._patience_s = patience_s
        self._departed = departed
        self._places: dict[int, Place] = {}
        self._leader = ""
        self._looking: dict[Place, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Never returns. ``StoreLost`` when the store is."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow_places())
                group.create_task(self._follow_leader())
        finally:
            for task in self._looking.values():
                task.cancel()
            await asyncio.gather(*self._looking.values(), return_exceptions=True)
            self._looking.clear()

    async def _follow_places(self) -> None:
        async for change in self._store.watch(HOSTS):
            node = int(change.key.removeprefix(HOSTS))
            self._places.pop(node, None)
            if change.value is not None and (place := Place.loads(change.value)) is not None:
                self._places[node] = place
            self._turn()

    async def _follow_leader(self) -> None:
        async for change in self._store.watch(LEADER_KEY):
            if change.key == LEADER_KEY and change.value is not None:
                self._leader = change.value.decode()
                self._turn()

    def _turn(self) -> None:
        """Look at those who are to be looked at, and at nobody else."""
        wanted = whom(self._places, self._node, self._leader)
        for place in self._looking.keys() - wanted:
            self._looking.pop(place).cancel()
        for place in wanted - self._looking.keys():
            self._looking[place] = asyncio.create_task(self._look(place))

    async def _look(self, place: Place) -> None:
        await until_gone((place.address, place.port), self._token, self._patience_s)
        self._departed(place.session)
        with contextlib.suppress(StoreLost):  # then it ends by itself
            await self._store.revoke(place.lease)
