"""Lion (`regrow.optim.Lion`): the sign of an average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unlerp

MEAN = "exp_avg"


class _Coefficients(NamedTuple):
    lr: float
    shrink: float
    beta1: float
    beta2: float
    maximize: bool
    first: bool
    param: bool
    mean: bool


class LionRule(Elementwise):
    """Inverse of `regrow.optim.Lion`.

    Forward, with g negated if maximize::

        p *= 1 - lr wd;  p' = p - lr sign(m + (1 - b1)(g - m));  m' = m + (1 - b2)(g - m)

    m comes first, and with it the sign. Exactness: m within a few ulp of the larger of m and g; p within 2 ulp, but
    off by up to 2 lr in the rare element whose average is zero to within the error of m, so that its sign comes out
    wrong.
    Kept: p if lr wd is near 1; m if b2 is near 0.
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The average."""
        return (MEAN,)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        shrink = 1 - note.number("lr") * note.number("weight_decay")
        wanted = ((PARAM, not divides(shrink)), (MEAN, not divides(note.hyper["betas"][1])))
        return tuple(name for name, keep in wanted if keep)

    def prepare(self, note: Note) -> _Coefficients:
        """Options as numbers."""
        beta1, beta2 = note.hyper["betas"]
        return _Coefficients(
            lr=note.number("lr"),
            shrink=1 - note.number("lr") * note.number("weight_decay"),
            beta1=beta1,
            beta2=beta2,
            maximize=note.hyper["maximize"],
            first=MEAN not in note.had,
            param=PARAM not in note.kept,
            mean=note.wanted(MEAN),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        grad = step_gradient(s, maximize=k.maximize, decay=0)
        if k.mean:
            unlerp(s.new[MEAN], grad, 1 - k.beta2, s.old[MEAN])
        if k.param:
            before = s.spare[1].zero_() if k.first else s.old[MEAN]
            sign = torch.lerp(before, grad, 1 - k.beta1, out=s.spare[1]).sign_()
            torch.add(s.new[PARAM], sign, alpha=k.lr, out=s.old[PARAM])
            if k.shrink != 1:
                s.old[PARAM].div_(k.shrink)
