"""What a state must offer to be checkpointed block by block: names, and values to get and to put."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from regrow.iterative import arrays
from regrow.iterative.arrays import Array, Value


class Blocks(Protocol):
    """A state in named blocks. The names stay the same, and so does the shape of each block's first array."""

    def names(self) -> Sequence[str]:
        """Return the names of all blocks, in an order that is the same in every process."""

    def get(self, name: str) -> Value:
        """Return a block's arrays as they are now: the live ones, not copies.

        The first array is the parameter itself: distances are taken on it. Others (an optimizer's moments, whatever
        must not be younger or older than the parameter) travel with it.
        """

    def put(self, name: str, value: Sequence[Array]) -> None:
        """Take over saved values, by copying them: the arrays given belong to the checkpoint."""


@runtime_checkable
class Noted(Blocks, Protocol):
    """Blocks of which something must be known to put them back where nothing is left of them."""

    def note(self, name: str) -> str:
        """Return a short text that is saved with the block: what its arrays are, for instance."""


class ArrayBlocks:
    """Blocks that are arrays, or parts of arrays, which the algorithm changes in place."""

    def __init__(self, blocks: Mapping[str, Value]) -> None:
        self._blocks = {name: arrays.arrays_of(value, f"block {name!r}") for name, value in blocks.items()}

    @classmethod
    def rows(cls, **state: Value) -> ArrayBlocks:
        """Make a block of each row: ``rows(w=w)`` gives ``w[0]``, ``w[1]``, and so on.

        Of several arrays, ``rows(w=(w, momentum))``, a block has the same row of each.
        """
        found: dict[str, Value] = {}
        for name, value in state.items():
            together = arrays.arrays_of(value, name)
            lengths = {len(array) for array in together}
            if len(lengths) != 1:
                raise ValueError(f"{name}: arrays of {sorted(lengths)} rows cannot be cut into the same rows")
            for row in range(lengths.pop()):
                found[f"{name}[{row}]"] = tuple(array[row : row + 1] for array in together)
        return cls(found)

    def names(self) -> Sequence[str]:
        """Return the names, in the order given."""
        return list(self._blocks)

    def get(self, name: str) -> Sequence[Array]:
        """Return the arrays themselves."""
        return self._blocks[name]

    def put(self, name: str, value: Sequence[Array]) -> None:
        """Write into the arrays."""
        for target, source in zip(self._blocks[name], value, strict=True):
            arrays.fill(target, source)


def checked_names(blocks: Blocks) -> list[str]:
    """Return the names of all blocks; ``ValueError`` if they cannot serve."""
    names = list(blocks.names())
    if not names:
        raise ValueError("there are no blocks: give at least one")
    twice = [name for name, count in zip(*np.unique(names, return_counts=True), strict=True) if count > 1]
    if twice:
        raise ValueError(f"blocks need names of their own, but {twice[0]!r} is there more than once")
    return names


def known(given: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the given names in the order of all; ``ValueError`` if one is none of them."""
    asked = set(given)
    unknown = sorted(asked - set(names))
    if unknown:
        raise ValueError(f"there is no block {unknown[0]!r}: names() tells what there is")
    return [name for name in names if name in asked]
