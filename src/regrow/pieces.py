"""Steps an optimizer for some of its parameters, with gradients given beside them, in pieces that stay in cache.

The optimizer itself, its gradients, hooks and count of steps are left alone: a twin steps that shares its options and
state. An elementwise optimizer gets large parameters in pieces, since its step passes over its tensors several times
and makes temporaries as large as they are, which in a thread other than the main one come as fresh pages each time.
The bits are those of a step over the whole: a piece ends where the vector instructions over the whole have a boundary.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 18
"""Elements of a piece: a few tensors of this size fit in a core's cache, and a step over one outweighs its calls."""


@torch.no_grad()
def step(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor], *, elementwise: bool
) -> None:
    """Let ``optimizer`` update these parameters, and no others, with these gradients."""
    grad_of = {id(param): grad for param, grad in zip(params, grads, strict=True)}
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    # a step of the twin is no step of the user's: none of the user's hooks, no scheduler's count of steps
    twin.__dict__.pop("step", None)
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    twin.state = defaultdict(dict)
    twin.param_groups = []
    cut: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in optimizer.param_groups:
        stand_ins = []
        for param in group["params"]:
            grad = grad_of.get(id(param))
            if grad is None:
                continue
            state = optimizer.state[param]
            if elementwise and not group.get("fused") and _can_be_cut(param, grad, state):
                for piece, piece_state in _pieces(param, grad, state):
                    twin.state[piece] = piece_state
                    stand_ins.append(piece)
                cut.append((state, piece_state))
            else:
                whole = param.detach()
                whole.grad = grad
                twin.state[whole] = state
                stand_ins.append(whole)
        twin.param_groups.append({**group, "params": stand_ins})
    twin.step()
    for state, last in cut:
        for name, value in state.items():
            if value.dim() == 0:
                value.copy_(last[name])


def _can_be_cut(param: Tensor, grad: Tensor, state: Mapping[str, Any]) -> bool:
    """Whether it is large, and all its state (not made by the first step only) is of its shape or one number."""
    if param.numel() <= PIECE or not state or not (param.is_contiguous() and grad.is_contiguous()):
        return False
    return all(
        isinstance(value, Tensor) and (value.dim() == 0 or (value.shape == param.shape and value.is_contiguous()))
        for value in state.values()
    )


def _pieces(param: Tensor, grad: Tensor, state: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Cut a parameter, its gradient and its state; a piece has its own copy of each number (the count of steps)."""
    flat, flat_grad = param.detach().view(-1), grad.view(-1)
    flat_state = {name: value.view(-1) if value.dim() else value for name, value in state.items()}
    for start in range(0, param.numel(), PIECE):
        size = min(PIECE, param.numel() - start)
        piece = flat.narrow(0, start, size)
        piece.grad = flat_grad.narrow(0, start, size)
        yield (
            piece,
            {
                name: value.narrow(0, start, size) if value.dim() else value.clone()
                for name, value in flat_state.items()
            },
        )
