"""Muon: momentum, orthogonalised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from regrow.undo.rule import PARAM, Note, Rule, Slice, divides, unlerp

BUFFER = "momentum_buffer"


class MuonRule(Rule):
    """Inverse of `torch.optim.Muon`.

    Forward, NS being the Newton-Schulz iteration in bfloat16, which torch's own function computes here too::

        b' = b + (1 - mu)(g - b);  u = NS(g + mu (b' - g) if nesterov else b')
        p' = p (1 - lr wd) - adjusted_lr u

    Exactness: p within 2 ulp where the update is not larger than p (u is the step's own, bit for bit); b as a first
    moment of Adam.
    Costs as much as the step: u is computed again. Kept: p if lr wd is near 1, b if mu is near 0, and
    in bfloat16 without nesterov, where torch's step overwrites it.
    """

    elementwise: bool = False
    spares: int = 0

    def refuse(self, group: Mapping[str, Any]) -> str | None:
        """Every option is invertible."""
        return None

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The momentum buffer."""
        return (BUFFER,)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        shrink = 1 - note.number("lr") * note.number("weight_decay")
        # torch normalises its argument in place where that is a bfloat16 tensor already: the buffer itself
        spoilt = note.grad.dtype == torch.bfloat16 and not note.hyper["nesterov"]
        wanted = ((PARAM, not divides(shrink)), (BUFFER, spoilt or not divides(note.number("momentum"))))
        return tuple(name for name, keep in wanted if keep)

    def note(self, note: Note) -> None:
        """Nothing to remember."""
        return

    def prepare(self, note: Note) -> Note:
        """The note itself has all."""
        return note

    def invert(self, k: Note, s: Slice) -> None:
        """See the class."""
        momentum, lr = k.number("momentum"), k.number("lr")
        if PARAM not in k.kept:
            # in the parameter's own type, as the step has it
            grad, move = s.grad.to(k.grad.dtype), s.new[BUFFER].to(k.grad.dtype)
            if k.hyper["nesterov"]:
                move = grad.lerp(move, momentum)
            move = _zeropower_via_newtonschulz(move, k.hyper["ns_coefficients"], k.hyper["ns_steps"], k.hyper["eps"])
            size = _adjust_lr(lr, k.hyper["adjust_lr_fn"], k.param.shape)
            torch.add(s.new[PARAM], move, alpha=size, out=s.old[PARAM]).div_(1 - lr * k.number("weight_decay"))
        if k.wanted(BUFFER):
            unlerp(s.new[BUFFER], s.grad, 1 - momentum, s.old[BUFFER])
