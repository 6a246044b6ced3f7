"""RMSprop: momentum, centered, weight decay, maximize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unaverage_square, unlerp

SQUARE, BUFFER, MEAN = "square_avg", "momentum_buffer", "grad_avg"


class _Coefficients(NamedTuple):
    lr: float
    alpha: float
    eps: float
    decay: float
    momentum: float
    centered: bool
    maximize: bool
    param: bool
    square: bool
    buffer: bool
    mean: bool
    above: float


class RMSpropRule(Elementwise):
    """Inverse of `torch.optim.RMSprop`.

    Forward, with g negated if maximize and a = alpha::

        g += wd p;  v' = a v + (1 - a) g^2;  centered: m' = m + (1 - a)(g - m)
        d = sqrt(v' - m'^2 or v') + eps
        momentum: b' = mu b + g/d, p' = p - lr b';  else p' = p - lr g/d

    Exactness: p within 2 ulp where the update is not larger than p; v, m and b within a few ulp, many where they are
    much smaller than what the step added. v is never below zero, and
    never below m^2 if centered: the next step takes the root of the difference.
    Kept: p with weight decay and no momentum (p then stands on both sides, divided by something that may be zero); v
    and m if alpha is near 0, b if mu is.
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The running averages that these options have."""
        return (
            SQUARE,
            *((BUFFER,) if hyper["momentum"] > 0 else ()),
            *((MEAN,) if hyper["centered"] else ()),
        )

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        momentum, forgets = note.number("momentum"), not divides(note.number("alpha"))
        wanted = (
            (PARAM, note.number("weight_decay") != 0 and momentum <= 0),
            (SQUARE, forgets),
            (BUFFER, momentum > 0 and not divides(momentum)),
            (MEAN, note.hyper["centered"] and forgets),
        )
        return tuple(name for name, keep in wanted if keep)

    def prepare(self, note: Note) -> _Coefficients:
        """Options as numbers."""
        return _Coefficients(
            lr=note.number("lr"),
            alpha=note.number("alpha"),
            eps=note.number("eps"),
            decay=note.number("weight_decay"),
            momentum=note.number("momentum"),
            centered=note.hyper["centered"],
            maximize=note.hyper["maximize"],
            param=PARAM not in note.kept,
            square=note.wanted(SQUARE),
            buffer=note.wanted(BUFFER),
            mean=note.wanted(MEAN),
            above=1 + 8 * torch.finfo(note.param.dtype).eps,
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        if k.momentum > 0:
            torch.add(s.new[PARAM], s.new[BUFFER], alpha=k.lr, out=s.old[PARAM])
        grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
        denominator = s.spare[1]
        if k.centered:
            torch.addcmul(s.new[SQUARE], s.new[MEAN], s.new[MEAN], value=-1, out=denominator).sqrt_()
        else:
            torch.sqrt(s.new[SQUARE], out=denominator)
        denominator.add_(k.eps)
        if k.buffer:
            torch.addcdiv(s.new[BUFFER], grad, denominator, value=-1, out=s.old[BUFFER]).div_(k.momentum)
        if k.momentum <= 0 and k.param:
            torch.addcdiv(s.new[PARAM], grad, denominator, value=k.lr, out=s.old[PARAM])
        if k.square:
            unaverage_square(s.new[SQUARE], grad, k.alpha, s.old[SQUARE])
        if k.mean:
            unlerp(s.new[MEAN], grad, 1 - k.alpha, s.old[MEAN])
            if k.square:
                floor = torch.mul(s.old[MEAN], s.old[MEAN], out=s.spare[1]).mul_(k.above)
                torch.maximum(s.old[SQUARE], floor, out=s.old[SQUARE])
