"""Adafactor: second moments as the product of a row and a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regrow.undo.rule import PARAM, Note, Rule, Slice, divides, unlerp

ROW, COLUMN, VARIANCE = "row_var", "col_var", "variance"
_SCALE = "scale"


class AdafactorRule(Rule):
    """Inverse of `torch.optim.Adafactor`.

    Forward at count t, with g negated if maximize, w = t^beta2_decay, rho = min(lr, 1/sqrt(t))::

        alpha = max(eps2, rms(p)) rho;  p *= 1 - lr wd
        matrices: R' = R + w (mean of g^2 over columns - R), C' likewise over rows, V = R' C' / max(mean of R', eps1)
        vectors:  V = V' = V + w (g^2 - V)
        u = g / sqrt(max(V, eps1^2));  p' = p - alpha / max(1, rms(u)/d) u

    Exactness: p within 2 ulp where the update is not larger than p; R, C, V within a few ulp, many where they are much
    smaller than what the step added; never below zero.
    Kept: one scalar, max(eps2, rms(p)); p if lr wd is near 1; the second moments if w is near 1.
    """

    elementwise: bool = False
    spares: int = 0

    def refuse(self, group: Mapping[str, Any]) -> str | None:
        """Every option is invertible."""
        return None

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Row and column, or the whole variance of a vector: those that a parameter has."""
        return (ROW, COLUMN, VARIANCE)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        kept = () if divides(1 - note.number("lr") * note.number("weight_decay")) else (PARAM,)
        return kept if divides(1 - note.count() ** note.number("beta2_decay")) else (*kept, ROW, COLUMN, VARIANCE)

    def note(self, note: Note) -> None:
        """Remember the scale of the old parameter, as the step is about to compute it."""
        param = note.param
        note.extra[_SCALE] = max(note.hyper["eps"][1], param.norm(2).item() / (param.numel() ** 0.5))

    def prepare(self, note: Note) -> Note:
        """The note itself has all."""
        return note

    def invert(self, k: Note, s: Slice) -> None:
        """See the class."""
        grad = -s.grad if k.hyper["maximize"] else s.grad
        if PARAM not in k.kept:
            update, size = self._update(k, s, grad)
            old = torch.add(s.new[PARAM], update, alpha=size, out=s.old[PARAM])
            old.div_(1 - k.number("lr") * k.number("weight_decay"))
        weight = k.count() ** k.number("beta2_decay")
        for name, dim in ((ROW, -1), (COLUMN, -2)):
            if k.wanted(name):
                mean = torch.norm(grad, dim=dim, keepdim=True).square_().div_(grad.size(dim))
                unlerp(s.new[name], mean, weight, s.old[name])
                s.old[name].clamp_min_(0)
        if k.wanted(VARIANCE):
            unlerp(s.new[VARIANCE], grad * grad, weight, s.old[VARIANCE])
            s.old[VARIANCE].clamp_min_(0)

    def _update(self, k: Note, s: Slice, grad: Tensor) -> tuple[Tensor, float]:
        """Return u and what it was multiplied by, from what the step left."""
        eps1 = k.hyper["eps"][0]
        if eps1 is None:
            eps1 = torch.finfo(k.param.dtype).eps
        if grad.dim() > 1:
            row = s.new[ROW]
            estimate = row @ s.new[COLUMN]
            estimate.div_(row.mean(dim=-2, keepdim=True).clamp_(min=eps1))
        else:
            estimate = s.new[VARIANCE].clone()
        update = estimate.clamp_(min=eps1 * eps1).rsqrt_().mul_(grad)
        rms = update.norm(2).item() / (update.numel() ** 0.5)
        alpha = k.extra[_SCALE] * min(k.number("lr"), 1 / k.count() ** 0.5)
        return update, alpha / max(1.0, rms / k.number("d"))
