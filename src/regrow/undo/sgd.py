"""SGD: momentum, dampening, Nesterov, weight decay, maximize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import _default_to_fused_or_foreach

from regrow.undo.layout import WORKING
from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient

BUFFER = "momentum_buffer"


class _Coefficients(NamedTuple):
    lr: float
    momentum: float
    gain: float
    decay: float
    nesterov: bool
    maximize: bool
    param_kept: bool
    buffer_wanted: bool
    grad_is_nesterov: bool


class SGDRule(Elementwise):
    """Inverse of `torch.optim.SGD`.

    Forward, with g negated if maximize::

        g += wd p;  b' = mu b + (1 - dampening) g  (first step: b' = g);  p' = p - lr (g + mu b' if nesterov else b' or
        g)

    Exactness: p within 2 ulp where the update is not larger than p; b within a few ulp of the larger of b and g,
    divided by mu.
    Kept: p if lr wd is near 1 and p is not simply p' + lr b'; b if mu is near 0.
    """

    keeps_by_options = True
    steps_elementwise = True

    def refuse(self, group: Mapping[str, Any]) -> str | None:
        """Refuse the fused step on a CPU in half precision: torch 2.13 leaves most elements as they are there."""
        half = [p.dtype for p in group["params"] if p.dtype in WORKING and p.device.type == "cpu"]
        if group["fused"] and half:
            return f"fused=True does not update {half[0]} parameters on a CPU (pytorch/pytorch#191763). Use fused=False"
        return None

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return (BUFFER,) if hyper["momentum"] != 0 else ()

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        momentum, nesterov = note.number("momentum"), note.hyper["nesterov"]
        kept: list[str] = []
        if (momentum == 0 or nesterov) and not divides(1 - note.number("lr") * note.number("weight_decay")):
            kept.append(PARAM)
        if momentum != 0 and not divides(momentum):
            kept.append(BUFFER)
        return tuple(kept)

    def prepare(self, note: Note) -> _Coefficients:
        """Options as numbers."""
        nesterov, decay, maximize = note.hyper["nesterov"], note.number("weight_decay"), note.hyper["maximize"]
        foreach = note.hyper["foreach"]
        if foreach is None and note.hyper["fused"] is None:
            foreach = _default_to_fused_or_foreach([note.param], differentiable=False)[1]
        return _Coefficients(
            lr=note.number("lr"),
            momentum=note.number("momentum"),
            gain=1 - note.number("dampening"),
            decay=decay,
            nesterov=nesterov,
            maximize=maximize,
            param_kept=PARAM in note.kept,
            buffer_wanted=note.wanted(BUFFER),
            # the multi-tensor step adds mu b' to p.grad itself when it has made no copy of it before
            grad_is_nesterov=bool(nesterov and foreach and not decay and not maximize),
        )

    def invert(self, k: _Coefficients, s: Slice) -> None:
        """See the class."""
        param, old = s.new[PARAM], s.old[PARAM]
        grad = torch.neg(s.grad, out=s.spare[0]) if k.maximize else s.grad
        if k.momentum == 0:
            if not k.param_kept:
                torch.add(param, grad, alpha=k.lr, out=old)
                if k.decay != 0:
                    old.div_(1 - k.lr * k.decay)
            return
        buffer = s.new[BUFFER]
        if k.nesterov and not k.param_kept:
            move = grad if k.grad_is_nesterov else torch.add(grad, buffer, alpha=k.momentum, out=s.spare[1])
            torch.add(param, move, alpha=k.lr, out=old)
            if k.decay != 0:
                old.div_(1 - k.lr * k.decay)
        elif not k.nesterov:
            torch.add(param, buffer, alpha=k.lr, out=old)
        if k.buffer_wanted:
            if k.grad_is_nesterov:
                grad = torch.sub(grad, buffer, alpha=k.momentum, out=s.spare[0])
            else:
                grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
            torch.sub(buffer, grad, alpha=k.gain, out=s.old[BUFFER]).div_(k.momentum)
