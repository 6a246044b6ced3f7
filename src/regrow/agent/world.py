"""What the agents agree on: one frozen value under one key of the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from regrow.rules import Policy


class Phase(StrEnum):
    """Where the run is. Only the last two are final."""

    SETUP = "SETUP"
    TRAINING = "TRAINING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Node:
    """One host. ``session`` is another one whenever it comes (back); ``slots``: how many ranks it can hold at most."""

    session: str
    slots: int
    standby: bool = False
    alive: bool = True


@dataclass(frozen=True)
class Loss:
    """One worker that the newest generation had to do without."""

    rank: int
    why: str
    t: float


@dataclass(frozen=True)
class Raised:
    """How often one rank raised at one step, and what it said the first time. ``fatal``: no replacement could help."""

    count: int
    kind: str
    message: str
    traceback: str
    fatal: bool = False


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything the agents agree on. ``exited`` maps ranks that ended with exit code 0 to their last step.

    ``homes`` is the node that each rank lives on (``None`` while no host has room for it) and ``local`` its number
    there. ``epoch`` counts the leaders; ``leader`` is the session of the newest. ``kept``: hosts' memory has every
    rank's state, too, and outlives all workers.
    ``policy`` says how a loss is met.
    """

    world_size: int
    max_restarts: int
    """How many workers may be lost; if any loss makes all start anew, how often."""
    incarnation: tuple[int, ...]
    homes: tuple[int | None, ...]
    local: tuple[int, ...]
    nodes: dict[int, Node]
    epoch: int = 0
    leader: str = ""
    generation: int = 0
    phase: Phase = Phase.SETUP
    ready: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    kept: bool = False
    finished: tuple[int, ...] = ()
    exited: dict[int, int | None] = field(default_factory=dict)
    restarts: int = 0
    policy: Policy = Policy.LADDER
    lost: tuple[Loss, ...] = ()
    raised: dict[str, Raised] = field(default_factory=dict)
    reason: str = ""
    evidence: str = ""
    exit_code: int | None = None
    t: float = 0.0
    setup_t: float = 0.0
    """When the newest set-up began."""
    setup_s: float = 0.0
    """How long it took: by this a replacement is measured, also by a host that was not there."""

    @staticmethod
    def first(
        nprocs: Sequence[int],
        max_restarts: int,
        t: float,
        nodes: Sequence[Node] = (),
        policy: Policy = Policy.LADDER,
    ) -> World:
        """Return the world before anything has started: so many ranks on each of these nodes, in order."""
        size = sum(nprocs)
        return World(
            world_size=size,
            max_restarts=max_restarts,
            policy=policy,
            incarnation=(0,) * size,
            homes=tuple(node for node, nproc in enumerate(nprocs) for _ in range(nproc)),
            local=tuple(local for nproc in nprocs for local in range(nproc)),
            nodes=dict(enumerate(nodes or [Node("", nproc) for nproc in nprocs])),
            t=t,
            setup_t=t,
        )

    @property
    def restart(self) -> bool:
        """Whether any loss ends all workers, and all start from storage."""
        return self.policy is Policy.RESTART

    @property
    def over(self) -> bool:
        """No further event can change it."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def all_finished(self) -> bool:
        """Every rank has said that it is through, or has left by its own decision."""
        return self.phase is not Phase.SETUP and len({*self.finished, *self.exited}) == self.world_size

    @property
    def homeless(self) -> tuple[int, ...]:
        """The ranks that wait for a host to come. One that has ended with exit code 0 needs none."""
        return tuple(rank for rank, home in enumerate(self.homes) if home is None and rank not in self.exited)

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks that live on a node."""
        return tuple(rank for rank, home in enumerate(self.homes) if home == node)

    def knows(self, node: int, session: str) -> bool:
        """Whether this is the session under which a node is a member now. Only then are its ranks its own."""
        known = self.nodes.get(node)
        return known is not None and known.alive and known.session == session

    def dumps(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loads(text: bytes) -> World:
        """Read what ``dumps`` wrote."""
        raw: dict[str, Any] = json.loads(text)
        raw["phase"] = Phase(raw["phase"])
        raw["policy"] = Policy(raw["policy"])
        for name in ("incarnation", "homes", "local", "ready", "holders", "finished"):
            raw[name] = tuple(raw[name])
        raw["nodes"] = {int(node): Node(**one) for node, one in raw["nodes"].items()}
        raw["exited"] = {int(rank): step for rank, step in raw["exited"].items()}
        raw["lost"] = tuple(Loss(**loss) for loss in raw["lost"])
        raw["raised"] = {key: Raised(**value) for key, value in raw["raised"].items()}
        return World(**raw)
