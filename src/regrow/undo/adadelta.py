"""Adadelta: updates in the units of past updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unaverage_square

SQUARE, DELTA = "square_avg", "acc_delta"


class _Coefficients(NamedTuple):
    lr: float
    rho: float
    eps: float
    decay: float
    maximize: bool
    param: bool
    first: bool
    square: bool
    delta: bool


class AdadeltaRule(Elementwise):
    """Inverse of `torch.optim.Adadelta`.

    Forward, with g negated if maximize::

        g += wd p;  v' = rho v + (1 - rho) g^2;  q = g / sqrt(v' + eps)
        delta = sqrt(a + eps) q;  a' = rho a + (1 - rho) delta^2;  p' = p - lr delta

    a' is linear in a once q is known: a = (a' - (1 - rho) eps q^2) / (rho + (1 - rho) q^2), and p follows from a.

    Exactness: p within 2 ulp where the update is not larger than p; v and a within a few ulp, many where they are much
    smaller than what the step added (the first steps). Neither is ever below zero.
    Kept: p with weight decay (v' and a' then hold p squared); v and a if rho is near 0.
    """

    keeps_by_options = True
    steps_elementwise = True

    spares: int = 3

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Both running averages."""
        return (SQUARE, DELTA)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        kept = (PARAM,) if note.number("weight_decay") != 0 else ()
        return kept if divides(note.number("rho")) else (*kept, SQUARE, DELTA)

    def prepare(self, note: Note) -> _Coefficients:
        """Options as numbers."""
        return _Coefficients(
            lr=note.number("lr"),
            rho=note.number("rho"),
            eps=note.number("eps"),
            decay=note.number("weight_decay"),
            maximize=note.hyper["maximize"],
            param=PARAM not in note.kept,
            first=DELTA not in note.had,
            square=note.wanted(SQUARE),
            delta=note.wanted(DELTA),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
        ratio = torch.add(s.new[SQUARE], k.eps, out=s.spare[1]).sqrt_()
        torch.div(grad, ratio, out=ratio)
        if k.delta:
            below = torch.mul(ratio, ratio, out=s.spare[2]).mul_(1 - k.rho)
            old = torch.sub(s.new[DELTA], below, alpha=k.eps, out=s.old[DELTA])
            old.div_(below.add_(k.rho)).clamp_min_(0)
        if k.param:
            if k.first:
                root: Any = s.spare[2].fill_(k.eps).sqrt_()
            else:
                root = torch.add(s.old[DELTA], k.eps, out=s.spare[2]).sqrt_()
            torch.add(s.new[PARAM], root.mul_(ratio), alpha=k.lr, out=s.old[PARAM])
        if k.square:
            unaverage_square(s.new[SQUARE], grad, k.rho, s.old[SQUARE])
