"""The part of a sharded state that this rank holds, and which ranks hold the same.

``fully_shard`` and DTensor give every rank a slice of each parameter and of its optimizer state; a
``ZeroRedundancyOptimizer`` gives every rank the optimizer state of some parameters. All that regrow keeps, moves or
compares is that part. The one place that knows DTensor and ZeRO; neither is imported before the script has done so.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # importing it takes seconds; without it nothing is sharded
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, detached: writing to it writes the tensor."""
    detached: Any = tensor.detach()
    return detached.to_local() if is_sharded(tensor) else detached


def like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is sharded as the given one, and of which this rank holds ``part``."""
    sharded: Any = tensor
    return type(sharded).from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def is_zero(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether each rank has the state of some parameters only."""
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)


def state_of(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, Any]:
    """Return the state that this rank keeps for an optimizer, by parameter."""
    sharded: Any = optimizer
    return sharded.optim.state if is_zero(optimizer) else sharded.state


def owns(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> bool:
    """Whether this rank keeps the optimizer's state of a parameter."""
    sharded: Any = optimizer
    inner = sharded.optim if is_zero(optimizer) else sharded
    return any(tensor is param for group in inner.param_groups for param in group["params"])


def state_tensors(optimizer: torch.optim.Optimizer) -> int:
    """Return how many tensors of a parameter's size an optimizer keeps for it: seen by one step on a tiny parameter."""
    sharded: Any = optimizer
    inner: Any = sharded.optim if is_zero(optimizer) else sharded
    tiny = torch.nn.Parameter(torch.zeros(2, 2))
    tiny.grad = torch.zeros(2, 2)
    settings = {name: value for name, value in inner.param_groups[0].items() if name != "params"}
    try:
        twin = type(inner)([{**settings, "params": [tiny]}])
        twin.step()
    except Exception:  # noqa: BLE001 (whatever a constructor of the script's own wants: Adam's two are a fair guess)
        return 2
    return sum(isinstance(value, torch.Tensor) and value.numel() == 4 for value in twin.state[tiny].values())


def place(tensors: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]) -> str:
    """Return a name for what a rank holds of these: ranks that hold the same parts get the same name."""
    digest = hashlib.sha256()
    if any(is_zero(optimizer) for optimizer in optimizers):
        digest.update(f"rank {dist.get_rank()}\n".encode())
    for tensor in tensors:
        if not is_sharded(tensor):
            digest.update(b"whole\n")
            continue
        sharded: Any = tensor
        at = sharded.device_mesh.get_coordinate()
        rows = [str(sharded.device_mesh.mesh.flatten().tolist())]  # the same place in another mesh is another place
        rows += [
            f"{dim}:{placement}:{at[dim]}"
            for dim, placement in enumerate(sharded.placements)
            if not placement.is_replicate()
        ]
        digest.update((" ".join(rows) + "\n").encode())
    return digest.hexdigest()[:12]
