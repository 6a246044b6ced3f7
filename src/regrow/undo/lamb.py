"""LAMB (`regrow.optim.LAMB`): Adam's update, scaled per tensor by a trust ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unaverage_square, unlerp

MEAN, SQUARE = "exp_avg", "exp_avg_sq"


class _Coefficients(NamedTuple):
    step_size: float
    eps: float
    shrink: float
    beta1: float
    beta2: float
    maximize: bool
    param: bool
    mean: bool
    square: bool


class LAMBRule(Elementwise):
    """Inverse of `regrow.optim.LAMB`.

    Forward at count t, with g negated if maximize and bc = 1 - beta^t::

        m' = m + (1 - b1)(g - m);  v' = b2 v + (1 - b2) g^2
        u = m'/bc1 / (sqrt(v')/sqrt(bc2) + eps) + wd p;  r = min(|p|/|u|, max_trust);  p' = p - lr r u

    r is in the state after the step, so p = (p' + lr r (u without decay)) / (1 - lr r wd).

    Exactness: as Adam, p divided by 1 - lr r wd. Kept: p if lr wd max_trust is over a half, so that the divisor could
    be small; m if b1 is near 0, v if b2 is.
    """

    keeps_by_options = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Both moments."""
        return (MEAN, SQUARE)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class. The ratio is not known yet, its bound is."""
        beta1, beta2 = note.hyper["betas"]
        wanted = (
            (PARAM, note.number("lr") * note.number("weight_decay") * note.number("max_trust") > 0.5),
            (MEAN, not divides(beta1)),
            (SQUARE, not divides(beta2)),
        )
        return tuple(name for name, keep in wanted if keep)

    def prepare(self, note: Note) -> _Coefficients:
        """Fold the ratio and the bias corrections into the step size."""
        beta1, beta2 = note.hyper["betas"]
        count, root = note.count(), (1 - beta2 ** note.count()) ** 0.5
        size = note.number("lr") * float(note.state["trust_ratio"])
        return _Coefficients(
            step_size=size / (1 - beta1**count) * root,
            eps=note.number("eps") * root,
            shrink=1 - size * note.number("weight_decay"),
            beta1=beta1,
            beta2=beta2,
            maximize=note.hyper["maximize"],
            param=PARAM not in note.kept,
            mean=note.wanted(MEAN),
            square=note.wanted(SQUARE),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        if k.param:
            denominator = torch.sqrt(s.new[SQUARE], out=s.spare[1]).add_(k.eps)
            old = torch.addcdiv(s.new[PARAM], s.new[MEAN], denominator, value=k.step_size, out=s.old[PARAM])
            if k.shrink != 1:
                old.div_(k.shrink)
        grad = step_gradient(s, maximize=k.maximize, decay=0)
        if k.mean:
            unlerp(s.new[MEAN], grad, 1 - k.beta1, s.old[MEAN])
        if k.square:
            unaverage_square(s.new[SQUARE], grad, k.beta2, s.old[SQUARE])
