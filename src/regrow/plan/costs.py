"""What a run has measured of itself, as far as the price of a recovery depends on it. Plain data: it travels as JSON.

Every rank tells its own measurements with its holding, so that all of them compute the same prices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regrow.rules import Source

Speeds = tuple[tuple[Source, float], ...]
"""Bytes a second by source. ``ROLLBACK`` stands for the checkpoints of a pipeline's stages, also in a replay."""


def speeds(found: Mapping[Source, float | None]) -> Speeds:
    """Return what was measured of these, in order."""
    return tuple((source, rate) for source in Source if (rate := found.get(source)) is not None and rate > 0)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What one rank has measured so far."""

    fetched: Speeds = ()
    """At how many bytes a second state came from there in an earlier recovery."""
    hinted: Speeds = ()
    """What suggests it otherwise: how fast snapshots were taken or sent, and checkpoints written."""
    step_s: float | None = None
    """A step of training."""
    replay_s: float | None = None
    """A step that was done again from journals."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "fetched": [list(pair) for pair in self.fetched],
            "hinted": [list(pair) for pair in self.hinted],
            "step_s": self.step_s,
            "replay_s": self.replay_s,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Costs:
        """Return what ``to_json`` was made of."""
        return cls(
            fetched=tuple((Source(source), float(rate)) for source, rate in value["fetched"]),
            hinted=tuple((Source(source), float(rate)) for source, rate in value["hinted"]),
            step_s=value["step_s"],
            replay_s=value["replay_s"],
        )
