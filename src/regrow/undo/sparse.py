"""Sparse gradients: the step touches some rows only, so those rows are kept instead of inverted.

Exact in both modes. What is kept is of the size of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Touched:
    """The rows that a sparse gradient is about to change, as they were.

    Everything, if the step also changes other rows.
    """

    def __init__(self, grad: Tensor, tensors: Mapping[str, Tensor], *, whole: bool) -> None:
        self._tensors = dict(tensors)
        # positions may repeat in a gradient that is not coalesced: each is then kept and put back twice, with the same
        # value
        self._where = tuple(grad._indices()) if not whole else ()
        self._rows = {
            name: t[self._where] if not whole and not t.is_sparse else t.clone() for name, t in tensors.items()
        }
        self._whole = whole

    def put_back(self) -> None:
        """Write the kept rows back."""
        for name, tensor in self._tensors.items():
            if self._whole or tensor.is_sparse:
                tensor.copy_(self._rows[name])
            else:
                tensor[self._where] = self._rows[name]

    def nbytes(self) -> int:
        """Return the bytes held."""
        return sum(row._values().nbytes if row.is_sparse else row.nbytes for row in self._rows.values())
