"""What a recovery has done, and what it is expected to cost; and recovery from storage, in another process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from regrow.iterative import storage
from regrow.iterative.blocks import Blocks, checked_names, known
from regrow.plan.perturbation import Cost, predict


@dataclass(frozen=True)
class Recovery:
    """Which blocks went back, how far, and what that means."""

    iteration: int
    """The one that the state is after, in the count of those who went on."""
    stale: Mapping[str, int]
    """For each block that was put back, how many iterations old its value is."""
    norm: float
    """The norm of the perturbation. Of lost blocks it is an estimate, from how fast they moved when last looked at."""
    cost: Cost
    missing: tuple[str, ...] = ()
    """Blocks that were lost and are not on storage: they keep what they have, mostly their first values."""
    damaged: tuple[str, ...] = ()
    """A sentence for each damaged record, and what was used in its place."""

    def __str__(self) -> str:
        ages = sorted(self.stale.values())
        old = f", {ages[0]} to {ages[-1]} iterations old" if ages else ""
        lines = [f"{len(ages)} blocks put back{old}; perturbation about {self.norm:.3g}; {self.cost}"]
        if self.missing:
            lines.append(f"not on storage: {', '.join(self.missing)}")
        return "\n".join([*lines, *self.damaged])


def restore(
    blocks: Blocks, directory: Path | str, *, lost: Iterable[str] | None = None, iteration: int | None = None
) -> Recovery:
    """Put back blocks from what another process has left on storage.

    Args:
        blocks: the state; its lost blocks get the values that are saved of them.
        directory: where the other process has kept its running checkpoint.
        lost: names; ``None``: all blocks, since the process that had them is gone.
        iteration: the one that others are after now; ``None``: the newest that a lost block was saved after.
    """
    names = checked_names(blocks)
    wanted = names if lost is None else known(lost, names)
    found = storage.read(directory)
    there = {name: found.records[name] for name in wanted if name in found.records}
    if iteration is None:
        iteration = max((record.iteration for record in there.values()), default=0)
    stale = {name: max(iteration - record.iteration, 0) for name, record in there.items()}
    moved = [record.speed * stale[name] for name, record in there.items() if record.speed >= 0]
    norm = math.sqrt(sum(value**2 for value in moved))
    for name, record in there.items():
        blocks.put(name, record.value)
    missing = tuple(name for name in wanted if name not in there)
    return Recovery(iteration, stale, norm, predict(norm, [], 0, [], 1), missing, tuple(found.damaged))
