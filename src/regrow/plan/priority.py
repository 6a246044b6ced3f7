"""Which blocks of a state to save next, and when. Pure: distances in, blocks out.

A full checkpoint every C iterations writes everything at once. A running checkpoint writes a fraction r every r * C
iterations, hence as many bytes in the same time, and may choose what. Best are the blocks that have moved farthest from
what is saved of them: then what is saved is nearest to what may be lost (SCAR, Qiao et al., ICML 2019).

Whoever asks with the same numbers gets the same answer, in any process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Priority(Enum):
    """What makes a block the next to be saved."""

    DISTANCE = "distance"
    """That it has moved farthest for its size: of blocks that differ in that, those go first that take the most off
    the distance for each byte that is written. Else small ones would never be saved."""
    RELATIVE = "relative"
    """That it has moved farthest compared with its norm: for blocks of different scale."""
    ROUND_ROBIN = "round_robin"
    """That it was saved longest ago."""
    RANDOM = "random"
    """Chance."""


@dataclass(frozen=True)
class Schedule:
    """When blocks are saved, and how much of the state each time."""

    every: int
    """C: in so many iterations as many bytes are written as the state has."""
    fraction: float = 1.0
    """r: how much of it at once. What is written is rounded to what whole iterations allow, see ``share``."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every={self.every}: give how many iterations may pass until all is written, 1 or more")
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction={self.fraction}: give the part to save at once, above 0 and at most 1")

    @property
    def period(self) -> int:
        """How many iterations lie between two rounds."""
        return max(round(self.fraction * self.every), 1)

    @property
    def share(self) -> float:
        """How much of the state a round writes, so that C iterations write all of it."""
        return self.period / self.every

    def due(self, iteration: int) -> bool:
        """Whether blocks are saved after this iteration."""
        return iteration % self.period == 0


class Chooser:
    """Chooses the blocks of each round, within the bytes that it may write.

    Blocks need not be of one size: what a round writes beyond its share is taken off the next ones.
    """

    def __init__(self, priority: Priority, share: float, *, seed: int = 0) -> None:
        self._priority = priority
        self._share = share
        self._seed = seed
        self._credit = 0.0

    def choose(
        self,
        iteration: int,
        *,
        sizes: Sequence[int],
        moved: Sequence[float],
        saved_at: Sequence[int],
        norms: Sequence[float] = (),
    ) -> list[int]:
        """Return the blocks to save now, most urgent first.

        ``sizes`` are bytes, ``moved`` is how far each block is from what is saved of it, ``saved_at`` when that was,
        ``norms`` how large it is now (for ``RELATIVE`` only). A block that has moved infinitely far, or nobody knows
        where to, is never chosen: what is saved of it is its last good value.
        """
        if not len(sizes) == len(moved) == len(saved_at):
            raise ValueError(
                f"{len(sizes)} sizes, {len(moved)} distances and {len(saved_at)} dates are of other blocks"
            )
        budget = self._share * sum(sizes)
        self._credit += budget
        chosen: list[int] = []
        for block in self._order(iteration, sizes, moved, saved_at, norms):
            if self._credit <= 1e-9 * budget:
                break
            if math.isfinite(moved[block]):
                chosen.append(block)
                self._credit -= sizes[block]
        self._credit = min(self._credit, 0.0)  # where all was chosen: there is nothing to catch up with
        return chosen

    def _order(
        self,
        iteration: int,
        sizes: Sequence[int],
        moved: Sequence[float],
        saved_at: Sequence[int],
        norms: Sequence[float],
    ) -> list[int]:
        blocks = list(range(len(moved)))
        match self._priority:
            case Priority.DISTANCE:
                # squares of distances add up: what a byte takes off is the square by the size
                return sorted(blocks, key=lambda block: _urgent_first(moved[block] / math.sqrt(max(sizes[block], 1))))
            case Priority.RELATIVE:
                return sorted(blocks, key=lambda block: _urgent_first(_relative(moved[block], norms[block])))
            case Priority.ROUND_ROBIN:
                return sorted(blocks, key=lambda block: saved_at[block])
            case Priority.RANDOM:
                # seeded by a text: the same in every process, whatever its hashes
                random.Random(f"{self._seed}:{iteration}").shuffle(blocks)
                return blocks


def _urgent_first(value: float) -> float:
    return 0.0 if math.isnan(value) else -value  # a NaN has no place in an order


def _relative(moved: float, norm: float) -> float:
    if norm > 0:
        return moved / norm
    return math.inf if moved > 0 else 0.0
