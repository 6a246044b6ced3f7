"""Adamax: the infinity norm in place of the second moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unlerp

MEAN, NORM = "exp_avg", "exp_inf"


class _Coefficients(NamedTuple):
    step_size: float
    decay: float
    beta1: float
    maximize: bool
    mean: bool


class AdamaxRule(Elementwise):
    """Inverse of `torch.optim.Adamax`.

    Forward at count t, with g negated if maximize::

        g += wd p;  m' = m + (1 - b1)(g - m);  u' = max(b2 u, |g| + eps);  p' = p - lr/(1 - b1^t) m'/u'

    Exactness: p within 2 ulp where the update is not larger than p; m as in Adam; u exact.
    Kept: u always (a maximum forgets the smaller side); m if b1 is near 0.
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """First moment and norm."""
        return (MEAN, NORM)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        return (NORM,) if divides(float(note.hyper["betas"][0])) else (MEAN, NORM)

    def prepare(self, note: Note) -> _Coefficients:
        """Bias correction at the count after the step."""
        beta1 = float(note.hyper["betas"][0])
        return _Coefficients(
            step_size=note.number("lr") / (1 - beta1 ** note.count()),
            decay=note.number("weight_decay"),
            beta1=beta1,
            maximize=note.hyper["maximize"],
            mean=note.wanted(MEAN),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        torch.addcdiv(s.new[PARAM], s.new[MEAN], s.new[NORM], value=k.step_size, out=s.old[PARAM])
        if k.mean:
            unlerp(s.new[MEAN], step_gradient(s, maximize=k.maximize, decay=k.decay), 1 - k.beta1, s.old[MEAN])
