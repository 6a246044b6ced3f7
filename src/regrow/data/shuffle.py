"""A shuffle that can be entered anywhere: a keyed bijection of 0..n-1, evaluated at the positions asked for.

A permutation that is drawn has to be drawn whole before its last element is known; a process that comes in at batch
90,000 would pay for all of it. Here the sample at a position is a function of (seed, epoch, position). Nothing is
stored.

The bijection is a Feistel network on a grid of about sqrt(n) times sqrt(n) places. The grid is a little larger than n;
a value outside 0..n-1 is sent through again until it falls inside (cycle walking, rare, and still a bijection). It is
made for shuffling, not for secrecy.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_ROUNDS = 8
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB
_SHIFT_A = np.uint64(29)
_SHIFT_B = np.uint64(8)  # the low bits of a product are the poorest

Positions = npt.NDArray[np.uint64]


def mix(*values: int) -> int:
    """Hash integers (the low 64 bits of each, in this order) to 64 bits."""
    state = 0
    for value in values:
        state = (state + (value & _MASK) + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _MIX_A) & _MASK
        state = ((state ^ (state >> 27)) * _MIX_B) & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A bijection of 0..size-1 chosen by the keys; ``at`` costs the same at any position."""

    def __init__(self, size: int, *keys: int) -> None:
        if size < 1:
            raise ValueError(f"cannot permute {size} elements")
        self.size = size
        rows = max(2, math.isqrt(size - 1) + 1)
        self._rows = np.uint64(rows)
        self._columns = np.uint64(-(-size // rows))
        root = mix(*keys)
        self._round_keys = [np.uint64(mix(root, number)) for number in range(_ROUNDS)]

    def at(self, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the elements that stand at these positions (each within 0..size-1)."""
        values = self._once(positions.astype(np.uint64))
        while True:
            (outside,) = np.nonzero(values >= self.size)
            if not outside.size:
                return values.astype(np.int64)
            values[outside] = self._once(values[outside])

    def _once(self, values: Positions) -> Positions:
        row, column = values // self._columns, values % self._columns
        for number, key in enumerate(self._round_keys):
            # each half is shifted by a function of the other one: a bijection, whatever the function
            if number % 2:
                column += _scramble(row, key) % self._columns
                column %= self._columns
            else:
                row += _scramble(column, key) % self._rows
                row %= self._rows
        return row * self._columns + column


def _scramble(values: Positions, key: np.uint64) -> Positions:
    mixed = values ^ key
    mixed *= _MIX_A
    mixed ^= mixed >> _SHIFT_A
    mixed *= _MIX_B
    mixed >>= _SHIFT_B
    return mixed
