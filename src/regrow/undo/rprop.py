"""Rprop: step sizes that follow the sign of the gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice

PREVIOUS, SIZE = "prev", "step_size"


class RpropRule(Elementwise):
    """Inverse of `torch.optim.Rprop`.

    Forward, with g negated if maximize::

        f = eta+ / eta- / 1 where g prev is > 0 / < 0 / = 0;  h' = clamp(h f);  g = 0 where f = eta-
        p' = p - sign(g) h';  prev' = g

    prev' and h' say what was subtracted, so the inverse needs no gradient.

    Exactness: p within 1 ulp of the larger of p and h'; h and prev exact.
    Kept: h and prev, always (a clamp and an overwritten tensor).
    """

    steps_elementwise = True

    spares: int = 1

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The step sizes and the previous gradient."""
        return (PREVIOUS, SIZE)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        return (PREVIOUS, SIZE)

    def prepare(self, note: Note) -> None:
        """Nothing to prepare."""
        return

    def invert(self, k: None, s: Slice) -> None:
        """See the class."""
        sign = torch.sign(s.new[PREVIOUS], out=s.spare[0])
        torch.addcmul(s.new[PARAM], sign, s.new[SIZE], out=s.old[PARAM])
