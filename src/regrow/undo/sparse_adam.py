"""SparseAdam: only rows with a gradient move, and those rows are kept (see `regrow.undo.sparse`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regrow.undo.rule import Elementwise, Note, Slice


class SparseAdamRule(Elementwise):
    """`torch.optim.SparseAdam` refuses dense gradients, and sparse ones need no inverse.

    Exactness: exact. Kept: the rows of p, m and v that the gradient touches.
    """

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Both moments."""
        return ("exp_avg", "exp_avg_sq")

    def keep(self, note: Note) -> tuple[str, ...]:
        """Nothing beside the touched rows."""
        return ()

    def prepare(self, note: Note) -> None:
        """Never reached."""
        raise AssertionError("SparseAdam with a dense gradient")

    def invert(self, k: None, s: Slice) -> None:
        """Never reached."""
        raise AssertionError("SparseAdam with a dense gradient")
