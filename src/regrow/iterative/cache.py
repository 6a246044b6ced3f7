"""The running checkpoint in memory: of every block the value that was saved last, and how it has moved since."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from regrow.iterative import arrays
from regrow.iterative.arrays import Array
from regrow.iterative.blocks import Blocks, Noted


@dataclass
class Entry:
    """One block as it was saved. Its arrays live where the block's live; the cache alone writes to them."""

    value: tuple[Array, ...]
    iteration: int
    moved: float = 0.0
    """How far the block had moved when it was last looked at, before it was saved perhaps,"""
    looked_after: int = 0
    """in so many iterations; 0: nobody has looked yet."""
    speed: float = math.nan
    """How far that is in an iteration; NaN: not known."""
    note: str = ""
    """What its owner says of it, see ``Noted``."""

    def drift(self, stale: int) -> float:
        """Estimate how far a block is from its saved value after so many iterations.

        At the speed of its last look: where the algorithm converges, blocks slow down, so it is rather too far.
        """
        return 0.0 if stale <= 0 or math.isnan(self.speed) else self.speed * stale


class Cache:
    """Saved values of blocks, in the memory of the process that has the blocks."""

    def __init__(self, blocks: Blocks, names: Sequence[str], iteration: int) -> None:
        self._blocks = blocks
        self.entries: dict[str, Entry] = {}
        for name in names:
            self.take(name, iteration)

    def live(self, name: str) -> tuple[Array, ...]:
        """Return a block's own arrays."""
        return arrays.arrays_of(self._blocks.get(name), f"block {name!r}")

    def take(self, name: str, iteration: int) -> Entry:
        """Save a block as it is now."""
        value = self.live(name)
        entry = self.entries.get(name)
        if entry is None or not arrays.alike(entry.value, value):
            copies = tuple(map(arrays.copy, value))
            entry = Entry(copies, iteration) if entry is None else replace(entry, value=copies, iteration=iteration)
            entry.note = self._note(name)
            self.entries[name] = entry
            return entry
        for target, source in zip(entry.value, value, strict=True):  # in place: fresh memory is slow at its first use
            arrays.fill(target, source)
        entry.iteration = iteration
        entry.note = self._note(name)
        return entry

    def _note(self, name: str) -> str:
        return self._blocks.note(name) if isinstance(self._blocks, Noted) else ""

    def look(self, iteration: int) -> list[float]:
        """Return how far each block is from its saved value. Nothing is copied."""
        pairs = []
        for name, entry in self.entries.items():
            now = self.live(name)[0]
            if tuple(now.shape) != tuple(entry.value[0].shape):
                raise ValueError(
                    f"block {name!r} had the shape {tuple(entry.value[0].shape)} and has {tuple(now.shape)}: the first "
                    "array of a block must keep its shape"
                )
            pairs.append((now, entry.value[0]))
        moved = arrays.distances(pairs)
        for entry, distance in zip(self.entries.values(), moved, strict=True):
            stale = iteration - entry.iteration
            if stale > 0 and math.isfinite(distance):
                entry.moved, entry.looked_after, entry.speed = distance, stale, distance / stale
        return moved

    def norms(self) -> list[float]:
        """Return how large each block is."""
        return arrays.norms([self.live(name)[0] for name in self.entries])

    def sizes(self) -> list[int]:
        """Return how many bytes each block has, as saved."""
        return [sum(int(array.nbytes) for array in entry.value) for entry in self.entries.values()]

    def restore(self, names: Iterable[str], iteration: int) -> None:
        """Give blocks their saved values, which thereby are those that they have after this iteration."""
        for name in names:
            self._blocks.put(name, self.entries[name].value)
            self.entries[name].iteration = iteration


def speed(entries: Mapping[str, Entry]) -> float:
    """Return how far the whole state moves in an iteration, from the last look; NaN before the first one."""
    return math.sqrt(sum(entry.speed**2 for entry in entries.values()))
