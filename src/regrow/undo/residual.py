"""The bits that an inverse loses: the difference between the true old value and the computed one, as integers.

A byte per element, and a list of positions for the few that differ by more. Where a chunk has too many of those, its
differences are kept whole. Differences of bit patterns wrap, so that adding one to the computed pattern gives the true
one back whatever they are: -0.0 and infinities too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from regrow.undo.layout import Pool


class Residual:
    """Differences of some equally long tensors (rows) of one parameter, chunk by chunk."""

    def __init__(self, pool: Pool, rows: int, length: int, like: Tensor) -> None:
        self._small = pool.take((rows, length), like, torch.int8)
        self._wide: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._whole: dict[tuple[int, int], Tensor] = {}

    def put(self, start: int, difference: Tensor, scratch: Tensor) -> None:
        """Keep ``difference`` (true minus computed bits, rows x width).

        ``scratch`` is of the same shape and is overwritten.
        """
        rows, width = difference.shape
        self._small.narrow(1, start, width).copy_(difference)  # wraps: what does not fit is listed below
        for row in range(rows):
            low, high = torch.aminmax(difference[row])
            if int(low) < -128 or int(high) > 127:
                self._list(row, start, difference[row], scratch[row])

    def _list(self, row: int, start: int, difference: Tensor, scratch: Tensor) -> None:
        where = _beyond_a_byte(difference, scratch)
        size = difference.element_size()
        if where.numel() * (4 + size) >= difference.numel() * size:
            self._whole[row, start] = difference.clone()
        else:
            self._wide[row, start] = (where.to(torch.int32), difference[where])

    def get(self, start: int, out: Tensor) -> Tensor:
        """Fill ``out`` (rows x width, an integer type) with the differences put at ``start``."""
        out.copy_(self._small.narrow(1, start, out.shape[1]))
        for row in range(out.shape[0]):
            whole = self._whole.get((row, start))
            if whole is not None:
                out[row].copy_(whole)
            wide = self._wide.get((row, start))
            if wide is not None:
                where, value = wide
                out[row][where.long()] = value
        return out

    def listed_bytes(self) -> int:
        """Return the bytes held beside the pool's."""
        pairs = sum(where.nbytes + value.nbytes for where, value in self._wide.values())
        return pairs + sum(whole.nbytes for whole in self._whole.values())

    def drop(self, pool: Pool) -> None:
        """Give the memory back."""
        pool.give(self._small)
        self._wide.clear()
        self._whole.clear()


def _beyond_a_byte(difference: Tensor, scratch: Tensor) -> Tensor:
    """Return the positions of the differences that do not fit in a byte."""
    torch.add(difference, 128, out=scratch)
    if scratch.device.type == "cpu":
        # numpy finds a few among many in a quarter of the time
        shifted = scratch.numpy()
        return torch.from_numpy(np.flatnonzero(shifted.view(f"u{shifted.itemsize}") > 255))
    return scratch.bitwise_right_shift_(8).nonzero().squeeze(1)
