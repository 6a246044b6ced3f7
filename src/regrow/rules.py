"""What a plan may use: which sources there are, and what the user has said of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Source(StrEnum):
    """Where the state of a lost rank may come from."""

    REPLICA = "replica"
    """A live rank that has the same."""
    MEMORY = "memory"
    """Its last snapshot in its own host's memory."""
    PEER = "peer"
    """The same in another host's memory."""
    REPLAY = "replay"
    """Its checkpoint, and what the other stages of the pipeline have sent it since."""
    ROLLBACK = "rollback"
    """The checkpoints of a pipeline's stages, for all ranks."""
    PARTIAL = "partial"
    """A running checkpoint, for the lost rank alone: not the same bits."""
    DISK = "disk"
    """A checkpoint of the whole job on storage, for all ranks."""


class Policy(StrEnum):
    """How a loss is met."""

    LADDER = "ladder"
    """By whatever brings the job back soonest."""
    CHECKFREQ = "checkfreq"
    """Everyone goes back to the last checkpoint on storage."""
    COMMIT = "commit"
    """Everyone goes back to the copy in memory that was made every so many steps (Elastic Horovod)."""
    RESTART = "restart"
    """All processes are killed, and start from the last checkpoint on storage."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the user has said. The same on every rank."""

    policy: Policy = Policy.LADDER
    force: Source | None = None
    """Take this source, whatever it costs; ``None``: the cheapest."""
    approximate: bool = False
    """Whether a result may be used that is not the undisturbed run's."""

    @property
    def heals(self) -> bool:
        """Whether what lives is used. The other policies throw it away, so nothing need be kept for it at each step."""
        return self.policy is Policy.LADDER

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"policy": self.policy.value, "force": self.force, "approximate": self.approximate}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Rules:
        """Return what ``to_json`` was made of."""
        force = value["force"]
        return cls(
            policy=Policy(value["policy"]),
            force=None if force is None else Source(force),
            approximate=bool(value["approximate"]),
        )
