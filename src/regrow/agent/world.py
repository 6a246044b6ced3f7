"""What the agents agree on: one frozen value under one key of the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class Phase(StrEnum):
    """Where the run is. Only the last two are final."""

    SETUP = "SETUP"
    TRAINING = "TRAINING"
    DONE = "DONE"
    FAILED = "FAILED"


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
    """Everything the agents agree on. ``exited`` maps ranks that ended with exit code 0 to their last step."""

    world_size: int
    max_restarts: int
    incarnation: tuple[int, ...]
    generation: int = 0
    phase: Phase = Phase.SETUP
    ready: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    exited: dict[int, int | None] = field(default_factory=dict)
    restarts: int = 0
    lost: tuple[Loss, ...] = ()
    raised: dict[str, Raised] = field(default_factory=dict)
    reason: str = ""
    evidence: str = ""
    exit_code: int | None = None
    t: float = 0.0

    @staticmethod
    def first(world_size: int, max_restarts: int, t: float) -> World:
        """Return the world before anything has started."""
        return World(world_size=world_size, max_restarts=max_restarts, incarnation=(0,) * world_size, t=t)

    @property
    def over(self) -> bool:
        """No further event can change it."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def all_finished(self) -> bool:
        """Every rank has said that it is through, or has left by its own decision."""
        return self.phase is not Phase.SETUP and len({*self.finished, *self.exited}) == self.world_size

    def dumps(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def loads(text: bytes) -> World:
        """Read what ``dumps`` wrote."""
        raw: dict[str, Any] = json.loads(text)
        raw["phase"] = Phase(raw["phase"])
        for name in ("incarnation", "ready", "holders", "finished"):
            raw[name] = tuple(raw[name])
        raw["exited"] = {int(rank): step for rank, step in raw["exited"].items()}
        raw["lost"] = tuple(Loss(**loss) for loss in raw["lost"])
        raw["raised"] = {key: Raised(**value) for key, value in raw["raised"].items()}
        return World(**raw)
