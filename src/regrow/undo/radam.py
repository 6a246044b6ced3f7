"""RAdam: Adam whose denominator is used only once its variance is known well enough."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unaverage_square, unlerp

MEAN, SQUARE = "exp_avg", "exp_avg_sq"


class _Coefficients(NamedTuple):
    step_size: float
    rectified: bool
    eps: float
    shrink: float
    decay: float
    beta1: float
    beta2: float
    maximize: bool
    param: bool
    mean: bool
    square: bool


class RAdamRule(Elementwise):
    """Inverse of `torch.optim.RAdam`.

    Forward at count t, with g negated if maximize, bc = 1 - beta^t, rho_inf = 2/(1 - b2) - 1, rho = rho_inf - 2 t b2^t
    / bc2::

        decoupled: p *= 1 - lr wd;  coupled: g += wd p
        m' = m + (1 - b1)(g - m);  v' = b2 v + (1 - b2) g^2
        rho > 5: p' = p - lr/bc1 m' r sqrt(bc2) / (sqrt(v') + eps), r from rho;  else p' = p - lr/bc1 m'

    Exactness: as Adam. Kept: p if lr wd is near 1 and decoupled; m if b1 is near 0, v if b2 is.
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Both moments."""
        return (MEAN, SQUARE)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        beta1, beta2 = note.hyper["betas"]
        shrink = 1 - note.number("lr") * note.number("weight_decay")
        wanted = (
            (PARAM, note.hyper["decoupled_weight_decay"] and not divides(shrink)),
            (MEAN, not divides(float(beta1))),
            (SQUARE, not divides(float(beta2))),
        )
        return tuple(name for name, keep in wanted if keep)

    def prepare(self, note: Note) -> _Coefficients:
        """The step size, with or without the rectification of this count."""
        beta1, beta2 = (float(beta) for beta in note.hyper["betas"])
        count, lr, decay = note.count(), note.number("lr"), note.number("weight_decay")
        correction2 = 1 - beta2**count
        rho_inf = 2 / (1 - beta2) - 1
        rho = rho_inf - 2 * count * beta2**count / correction2
        size = lr / (1 - beta1**count)
        if rho > 5:
            size *= ((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)) ** 0.5 * correction2**0.5
        decoupled = note.hyper["decoupled_weight_decay"]
        return _Coefficients(
            step_size=size,
            rectified=rho > 5,
            eps=note.number("eps"),
            shrink=1 - lr * decay if decoupled else 1.0,
            decay=0.0 if decoupled else decay,
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
            if k.rectified:
                denominator = torch.sqrt(s.new[SQUARE], out=s.spare[1]).add_(k.eps)
                torch.addcdiv(s.new[PARAM], s.new[MEAN], denominator, value=k.step_size, out=s.old[PARAM])
            else:
                torch.add(s.new[PARAM], s.new[MEAN], alpha=k.step_size, out=s.old[PARAM])
            if k.shrink != 1:
                s.old[PARAM].div_(k.shrink)
        if not (k.mean or k.square):
            return
        grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
        if k.mean:
            unlerp(s.new[MEAN], grad, 1 - k.beta1, s.old[MEAN])
        if k.square:
            unaverage_square(s.new[SQUARE], grad, k.beta2, s.old[SQUARE])
