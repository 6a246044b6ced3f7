"""NAdam: Adam with Nesterov momentum whose coefficient grows with the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from regrow.undo.rule import PARAM, Elementwise, Note, Slice, divides, step_gradient, unaverage_square, unlerp

MEAN, SQUARE = "exp_avg", "exp_avg_sq"


class _Coefficients(NamedTuple):
    grad_size: float
    mean_size: float
    root: float
    eps: float
    shrink: float
    decay: float
    beta1: float
    beta2: float
    maximize: bool
    param: bool
    mean: bool
    square: bool


class NAdamRule(Elementwise):
    """Inverse of `torch.optim.NAdam`.

    Forward at count t, with g negated if maximize, mu_t = b1 (1 - 0.96^(t psi) / 2) and M_t the product of mu_1 to
    mu_t::

        decoupled: p *= 1 - lr wd;  coupled: g += wd p
        m' = m + (1 - b1)(g - m);  v' = b2 v + (1 - b2) g^2;  d = sqrt(v' / (1 - b2^t)) + eps
        p' = p - lr (1 - mu_t)/(1 - M_t) g/d - lr mu_(t+1)/(1 - M_t mu_(t+1)) m'/d

    Exactness: as Adam. M is a scalar and comes back exactly.
    Kept: p with coupled decay (p then stands on both sides, divided by something that may be zero) or if lr wd is near
    1; m if b1 is near 0, v if b2 is.
    """

    keeps_by_options = True
    steps_elementwise = True

    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        """Both moments."""
        return (MEAN, SQUARE)

    def keep(self, note: Note) -> tuple[str, ...]:
        """See the class."""
        beta1, beta2 = note.hyper["betas"]
        decay = note.number("weight_decay")
        shrink = 1 - note.number("lr") * decay
        coupled = decay != 0 and not note.hyper["decoupled_weight_decay"]
        wanted = (
            (PARAM, coupled or not divides(shrink)),
            (MEAN, not divides(float(beta1))),
            (SQUARE, not divides(float(beta2))),
        )
        return tuple(name for name, keep in wanted if keep)

    def prepare(self, note: Note) -> _Coefficients:
        """The momentum coefficients of this step, in double as the step has them."""
        beta1, beta2 = (float(beta) for beta in note.hyper["betas"])
        count, lr, decay = note.count(), note.number("lr"), note.number("weight_decay")
        psi = note.number("momentum_decay")
        mu = beta1 * (1.0 - 0.5 * 0.96 ** (count * psi))
        mu_next = beta1 * (1.0 - 0.5 * 0.96 ** ((count + 1) * psi))
        product = float(note.state["mu_product"])
        decoupled = note.hyper["decoupled_weight_decay"]
        return _Coefficients(
            grad_size=lr * (1.0 - mu) / (1.0 - product),
            mean_size=lr * mu_next / (1.0 - product * mu_next),
            root=(1 - beta2**count) ** 0.5,
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
        grad = step_gradient(s, maximize=k.maximize, decay=k.decay)
        if k.param:
            denominator = torch.sqrt(s.new[SQUARE], out=s.spare[1]).div_(k.root).add_(k.eps)
            old = torch.addcdiv(s.new[PARAM], s.new[MEAN], denominator, value=k.mean_size, out=s.old[PARAM])
            old.addcdiv_(grad, denominator, value=k.grad_size)
            if k.shrink != 1:
                old.div_(k.shrink)
        if k.mean:
            unlerp(s.new[MEAN], grad, 1 - k.beta1, s.old[MEAN])
        if k.square:
            unaverage_square(s.new[SQUARE], grad, k.beta2, s.old[SQUARE])
