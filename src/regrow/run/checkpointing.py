"""What the launcher said of checkpoints on storage. Imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where to, how often, how many."""

    url: str
    every: int | None
    """After how many steps; ``None``: as often as the budget allows."""
    overhead: float
    """The budget: what checkpoints may cost, as a part of the time."""
    keep: int
    mtbf_s: float | None
    """The mean time between failures, if it was said: more often than is worth it is not needed."""

    @property
    def said(self) -> list[float | None]:
        """What must be the same on all hosts: they write checkpoints of the same steps."""
        return [self.every, self.overhead, self.mtbf_s]
