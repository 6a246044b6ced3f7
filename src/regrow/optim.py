"""LAMB and Lion, which torch does not have: plain loops over the parameters.

They are here because their step can be taken back only if it leaves a trace (LAMB's trust ratio), or because its
arithmetic must be known (Lion's sign). They work on real dense parameters with dense gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT


def _check(**ranges: tuple[float, bool]) -> None:
    for name, (value, good) in ranges.items():
        if not good:
            raise ValueError(f"{name}={value} is out of range")


def _norm(tensor: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32 if tensor.dtype != torch.float64 else None)
    full: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)  # of a sharded parameter: over all shards
    return norm if full is None else full()


def _gradient(param: Tensor, *, maximize: bool, name: str) -> Tensor:
    grad = param.grad
    assert grad is not None
    if grad.is_sparse or param.is_complex():
        raise ValueError(f"{name} needs real parameters with dense gradients")
    return -grad if maximize else grad


class LAMB(Optimizer):
    """Layer-wise adaptive moments for large batches (You et al. 2020).

    Adam's update plus ``weight_decay`` times the parameter, scaled per tensor by the trust ratio ``min(|p| / |update|,
    max_trust)``, or 1 where a norm is zero. The ratio of the last step is kept in the state as ``trust_ratio``:
    without it the step could not be taken back.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        max_trust: float = 10.0,
        maximize: bool = False,
    ) -> None:
        _check(
            lr=(float(lr), float(lr) >= 0),
            beta1=(betas[0], 0 <= betas[0] < 1),
            beta2=(betas[1], 0 <= betas[1] < 1),
            eps=(eps, eps >= 0),
            weight_decay=(weight_decay, weight_decay >= 0),
            max_trust=(max_trust, 0 < max_trust < float("inf")),
        )
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "max_trust": max_trust,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        grad = _gradient(param, maximize=group["maximize"], name="LAMB")
        state = self.state[param]
        if len(state) == 0:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["trust_ratio"] = torch.tensor(1.0)
        state["step"] += 1
        count, (beta1, beta2) = state["step"].item(), group["betas"]
        lr, decay = float(group["lr"]), group["weight_decay"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (1 - beta2**count) ** 0.5
        update = square.sqrt().div_(root).add_(group["eps"])
        torch.div(mean, update, out=update).div_(1 - beta1**count)
        if decay != 0:
            update.add_(param, alpha=decay)
        param_norm, update_norm = _norm(param).item(), _norm(update).item()
        trust = min(param_norm / update_norm, group["max_trust"]) if param_norm > 0 and update_norm > 0 else 1.0
        state["trust_ratio"].fill_(trust)
        # the stored ratio is the one used, rounding included
        param.add_(update, alpha=-lr * state["trust_ratio"].item())


class Lion(Optimizer):
    """Evolved sign momentum (Chen et al. 2023): the sign of an average, with decoupled weight decay."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        _check(
            lr=(float(lr), float(lr) >= 0),
            beta1=(betas[0], 0 <= betas[0] < 1),
            beta2=(betas[1], 0 <= betas[1] < 1),
            weight_decay=(weight_decay, weight_decay >= 0),
        )
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        grad = _gradient(param, maximize=group["maximize"], name="Lion")
        state = self.state[param]
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        (beta1, beta2), lr, mean = group["betas"], float(group["lr"]), state["exp_avg"]
        if group["weight_decay"] != 0:
            param.mul_(1 - lr * group["weight_decay"])
        param.add_(mean.lerp(grad, 1 - beta1).sign_(), alpha=-lr)
        mean.lerp_(grad, 1 - beta2)
