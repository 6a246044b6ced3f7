"""Sets of parameter indices as sorted, disjoint half-open ranges: short to send, exact to compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Indices:
    """An immutable set of non-negative integers, ``((0, 3), (7, 8))`` for {0, 1, 2, 7}."""

    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, items: Iterable[int]) -> Indices:
        """Build the set from its members, in any order."""
        runs: list[tuple[int, int]] = []
        for item in sorted(set(items)):
            if runs and runs[-1][1] == item:
                runs[-1] = (runs[-1][0], item + 1)
            else:
                runs.append((item, item + 1))
        return cls(tuple(runs))

    @classmethod
    def span(cls, count: int) -> Indices:
        """Return {0, ..., count - 1}."""
        return cls(((0, count),)) if count else cls()

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs:
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __contains__(self, item: object) -> bool:
        return any(start <= item < stop for start, stop in self.runs) if isinstance(item, int) else False

    def __sub__(self, other: Indices) -> Indices:
        gone = set(other)
        return Indices.of(item for item in self if item not in gone)

    def __and__(self, other: Indices) -> Indices:
        kept = set(other)
        return Indices.of(item for item in self if item in kept)

    def __or__(self, other: Indices) -> Indices:
        return Indices.of([*self, *other])

    def __str__(self) -> str:
        return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in self.runs) or "none"

    def to_json(self) -> list[list[int]]:
        """Return the ranges as JSON lists."""
        return [list(run) for run in self.runs]

    @classmethod
    def from_json(cls, value: list[list[int]]) -> Indices:
        """Read what ``to_json`` gave."""
        return cls(tuple((int(a), int(b)) for a, b in value))
