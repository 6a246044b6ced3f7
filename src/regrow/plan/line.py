"""Which snapshots lie on the line that the present stands on, and which in a future that was given up. Pure.

A failure takes everybody back: steps that some had done are done again by the next generation, perhaps by others. A
host that was cut off meanwhile comes back with what it had: steps with the same numbers, of another past. So each
snapshot says in which generation it was taken, and the line says at which step each generation went on. It travels
with all that was made on it: in every rank's memory, and in the head of every snapshot. Whoever brings a snapshot of a
generation thus brings, too, what must be known to judge all older ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from regrow.ids import Step

Line = tuple[tuple[int, Step], ...]
"""Generations, and the step at whose start each went on. In order; the steps rise, since a lower one says it all."""

LONGEST = 64
"""So many entries are kept: they are a part of every snapshot's head."""

BEFORE_ALL = Step(-1)
"""Where a generation goes on that starts from the beginning: not even an older step 0 is its own."""


def lies_on(line: Line, step: Step, generation: int) -> bool:
    """Whether the state at the start of a step, as it was in a generation, is a past of what the line leads to."""
    return all(resumed >= step for later, resumed in line if later > generation)


def extended(line: Line, generation: int, step: Step) -> Line:
    """Return the line after a generation has gone on at a step."""
    return merged([line, ((generation, step),)])


def merged(lines: Iterable[Line]) -> Line:
    """Return what all of these know together.

    An entry that a later one makes needless is left out. If there are too many, the two oldest become one that says at
    least as much: a snapshot as old as that may then be passed over for nothing, but none is used that should not be.
    """
    lowest: dict[int, Step] = {}
    for line in lines:
        for generation, step in line:
            lowest[generation] = min(step, lowest.get(generation, step))
    kept: list[tuple[int, Step]] = []
    for generation in sorted(lowest, reverse=True):
        if not kept or lowest[generation] < kept[-1][1]:
            kept.append((generation, lowest[generation]))
    while len(kept) > LONGEST:
        (_, step), (later, _) = kept.pop(), kept.pop()
        kept.append((later, step))
    return tuple(reversed(kept))
