"""What an agent tells the person who watches, and writes down for the report."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping

from regrow.agent.happenings import Event, Forgotten, Led, Lost, NodeJoined, Suspect
from regrow.agent.world import Phase, World
from regrow.events import EventLog


def say(message: str) -> None:
    """Tell the person who watches, in one line."""
    now = time.time()
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    with contextlib.suppress(OSError, ValueError):
        print(f"[regrow] {clock}.{int(now % 1 * 1000):03d} {message}", file=sys.stderr, flush=True)


class Voice:
    """``how`` says who takes over each of this host's ranks. Only the agent that made a transition tells of it."""

    def __init__(self, log: EventLog, how: Mapping[int, str]) -> None:
        self._log = log
        self._how = how

    def record(self, before: World, world: World) -> None:
        """Write the transition down."""
        for node, one in world.nodes.items():
            known = before.nodes.get(node)
            if known is not None and known.alive and not world.knows(node, known.session):
                self._log.append("host_lost", host=node, session=known.session, generation=world.generation)
            if one.alive and not before.knows(node, one.session):
                self._log.append("host_joined", host=node, session=one.session, slots=one.slots)
        if world.epoch != before.epoch:
            self._log.append("leader", epoch=world.epoch, session=world.leader)
        if world.generation != before.generation:
            lost = [{"rank": loss.rank, "why": loss.why, "t": loss.t} for loss in world.lost]
            self._log.append(
                "generation", generation=world.generation, lost=lost, homes=world.homes, reason=world.reason
            )
        if world.phase is not before.phase:
            name = {Phase.TRAINING: "training", Phase.DONE: "done", Phase.FAILED: "failed", Phase.SETUP: "setup"}
            self._log.append(name[world.phase], generation=world.generation, reason=world.reason)

    def tell(self, before: World, world: World, event: Event) -> None:
        """Say what became of the event."""
        if world.over:
            return  # told by every agent, when it ends
        if isinstance(event, Lost):
            for worker in () if world.restart else event.workers:  # one line says it for all
                at = "" if worker.step is None else f" at step {worker.step}"
                how = "all start again" if world.phase is Phase.SETUP else self._how.get(worker.rank, "replaced")
                say(f"rank {worker.rank} died ({worker.why}){at}: generation {world.generation}, {how}")
            if world.restart or event.nodes or (before.phase is Phase.TRAINING and world.phase is Phase.SETUP):
                say(f"{world.reason} (generation {world.generation})")
        elif isinstance(event, Suspect | Forgotten):
            say(f"{world.reason} (generation {world.generation})")
        elif isinstance(event, NodeJoined) or (before.phase is Phase.SETUP and world.phase is Phase.TRAINING):
            say(world.reason)
        elif isinstance(event, Led) and world.epoch > 1:
            say(f"{world.reason}, epoch {world.epoch}")
        elif len(before.holders) < len(world.holders) == world.world_size:
            say(f"generation {world.generation}: all {world.world_size} ranks train again")

    @staticmethod
    def tell_of_homes(before: World | None, world: World) -> None:
        """Say once, on every host, that ranks wait for a host, and that they wait no more."""
        had, have = before.homeless if before is not None else (), world.homeless
        if world.over or bool(had) == bool(have):
            return
        if have:
            ranks = ", ".join(map(str, have))
            say(f"no host has room for rank {ranks}: waiting for one (`regrow run --standby ...` on another host)")
        else:
            say("every rank has a host again")
