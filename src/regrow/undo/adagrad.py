"""Adagrad: the sum of squared gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, step_gradient

SUM = "sum"


class _Coefficients(NamedTuple):
    step_size: float
    eps: float
    decay: float
    maximize: bool
    param: bool
    total: bool


class AdagradRule(Elementwise):
    """Inverse of `torch.optim.Adagrad`.

    Forward at count t, with g negated if maximize::

        g += wd p;  s' = s + g^2;  p' = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s') + eps)

    Exactness: p within 2 ulp where the update is not larger than p; s within 1 ulp of s', never below zero: s is wrong
    by many ulp of its own where it was much smaller than g^2, as in the first steps.
    Kept: p with weight decay (p then stands on both sides, divided by something that may be zero).
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The sum of squares."""
        return (SUM,)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        return (PARAM,) if note.number("weight_decay") != 0 else ()

    def prepare(self, note: Note) -> _Coefficients:
        """The decayed learning rate of this count."""
        return _Coefficients(
            step_size=note.number("lr") / (1 + (note.count() - 1) * note.number("lr_decay")),
            eps=note.number("eps"),
            decay=note.number("weight_decay"),
            maximize=note.hyper["maximize"],
            param=PARAM not in note.kept,
            total=note.wanted(SUM),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
        if k.param:
            denominator = torch.sqrt(s.new[SUM], out=s.spare[1]).add_(k.eps)
            torch.addcdiv(s.new[PARAM], grad, denominator, value=k.step_size, out=s.old[PARAM])
        if k.total:
            torch.addcmul(s.new[SUM], grad, grad, value=-1, out=s.old[SUM]).clamp_min_(0)
