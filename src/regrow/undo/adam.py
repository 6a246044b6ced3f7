"""Adam and AdamW: coupled and decoupled weight decay, AMSGrad, maximize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unaverage_square, unlerp

MEAN, SQUARE, MAX_SQUARE = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"


class _Coefficients(NamedTuple):
    step_size: float
    eps: float
    shrink: float
    decay: float
    beta1: float
    beta2: float
    maximize: bool
    amsgrad: bool
    param: bool
    mean: bool
    square: bool


class AdamRule(Elementwise):
    """Inverse of `torch.optim.Adam` and `torch.optim.AdamW`.

    Forward at count t, with g negated if maximize and bc = 1 - beta^t::

        decoupled: p *= 1 - lr wd;  coupled: g += wd p
        m' = m + (1 - b1)(g - m);  v' = b2 v + (1 - b2) g^2;  amsgrad: x' = max(x, v')
        p' = p - lr/bc1 m' / (sqrt(v' or x') / sqrt(bc2) + eps)

    Exactness: p within 2 ulp where the update is not larger than p; m and v within a few ulp, but many where they are
    much smaller than what the step added (m crossing zero, v in the first steps). v is never below zero.
    Kept: x always (a running maximum forgets); m if b1 is near 0, v if b2 is, p if lr wd is near 1 and decoupled.
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Both moments, and the running maximum of AMSGrad."""
        return (MEAN, SQUARE, MAX_SQUARE) if hyper["amsgrad"] else (MEAN, SQUARE)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        hyper = note.hyper
        beta1, beta2 = hyper["betas"]
        kept = []
        if hyper["decoupled_weight_decay"] and not divides(1 - note.number("lr") * note.number("weight_decay")):
            kept.append(PARAM)
        if not divides(float(beta1)):
            kept.append(MEAN)
        if not divides(float(beta2)):
            kept.append(SQUARE)
        if hyper["amsgrad"]:
            kept.append(MAX_SQUARE)
        return tuple(kept)

    def prepare(self, note: Note) -> _Coefficients:
        """Bias corrections at the count after the step, in double as the step has them."""
        beta1, beta2 = (float(beta) for beta in note.hyper["betas"])
        count, lr, decay = note.count(), note.number("lr"), note.number("weight_decay")
        decoupled = note.hyper["decoupled_weight_decay"]
        root = (
            1 - beta2**count
        ) ** 0.5  # moved from below the fraction to above it: one pass less, and less than an ulp of p
        return _Coefficients(
            step_size=lr / (1 - beta1**count) * root,
            eps=note.number("eps") * root,
            shrink=1 - lr * decay if decoupled else 1.0,
            decay=0.0 if decoupled else decay,
            beta1=beta1,
            beta2=beta2,
            maximize=note.hyper["maximize"],
            amsgrad=note.hyper["amsgrad"],
            param=PARAM not in note.kept,
            mean=note.wanted(MEAN),
            square=note.wanted(SQUARE),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        mean, square = s.new[MEAN], s.new[SQUARE]
        if k.param:
            denominator = torch.sqrt(s.new[MAX_SQUARE] if k.amsgrad else square, out=s.spare[1])
            denominator.add_(k.eps)
            old = torch.addcdiv(s.new[PARAM], mean, denominator, value=k.step_size, out=s.old[PARAM])
            if k.shrink != 1:
                old.div_(k.shrink)
        if not (k.mean or k.square):
            return
        grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
        if k.mean:
            unlerp(mean, grad, 1 - k.beta1, s.old[MEAN])
        if k.square:
            unaverage_square(square, grad, k.beta2, s.old[SQUARE])
