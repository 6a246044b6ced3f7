"""What a rank says of its running checkpoint when a generation is joined. Plain data: it travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regrow.ids import Step


@dataclass(frozen=True, kw_only=True)
class Running:
    """There to be used where the user has said ``approximate=True``, on all ranks or on none.

    Blocks are told of together, as far as they are alike: there may be thousands. What is squared is a sum over blocks.
    """

    own_steps: tuple[Step, ...] = ()
    """Of a survivor: steps for whose start its own small state is at hand, besides the one at which it stands."""
    ages: tuple[tuple[int, int, float], ...] = ()
    """Of a replacement: after which iteration blocks were saved, how many, and their speeds squared. Of one that has
    just been given its blocks, and has not gone on with them yet, the same."""
    period: int = 1
    """How many steps lie between two rounds."""
    speeds: tuple[tuple[int, float], ...] = ()
    """Of a survivor, at each of its last rounds: the iteration, and how far its part of the state moved in one."""
    moved: tuple[tuple[int, float], ...] = ()
    """Of a survivor, at the last look: in how many iterations blocks had moved, and how far, squared."""
    looked_at: int = 0
    """When that was."""

    @property
    def blocks(self) -> int:
        """How many blocks there are to be put back."""
        return sum(count for _, count, _ in self.ages)

    def stale(self, step: Step) -> list[int]:
        """Return how many steps old each block would be at this one, the oldest first."""
        found = [max(step - iteration, 0) for iteration, count, _ in self.ages for _ in range(count)]
        return sorted(found, reverse=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "own_steps": list(self.own_steps),
            "ages": [list(row) for row in self.ages],
            "period": self.period,
            "speeds": [list(row) for row in self.speeds],
            "moved": [list(row) for row in self.moved],
            "looked_at": self.looked_at,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Running:
        """Read what ``to_json`` gave."""
        return cls(
            own_steps=tuple(Step(step) for step in value["own_steps"]),
            ages=tuple((int(at), int(count), float(squared)) for at, count, squared in value["ages"]),
            period=int(value["period"]),
            speeds=tuple((int(at), float(speed)) for at, speed in value["speeds"]),
            moved=tuple((int(iterations), float(squared)) for iterations, squared in value["moved"]),
            looked_at=int(value["looked_at"]),
        )
