"""Refuses, when it is protected, what could not be healed: a sentence now instead of a failure after a crash.

Looks at what the run was given, and changes nothing.
"""

from __future__ import annotations

import sys

import torch
from torch.nn.parallel import DistributedDataParallel

from regrow import undo
from regrow.ddp import find_ddp
from regrow.state.registry import Registry


def check(registry: Registry, *, wait_free: bool, staged: bool) -> None:
    """``ValueError``, or ``UndoUnsupported``, with what is wrong and what to do instead."""
    for optimizer in registry.optimizers.values():
        undo.check_supported(optimizer)
    # importing it takes seconds; without it nothing is sharded
    sharding = sys.modules.get("torch.distributed.tensor")
    for param in registry.params:
        if sharding is not None and isinstance(param.tensor, sharding.DTensor):
            raise ValueError(
                f"parameter {param.name} is sharded over ranks, so no replica of it exists to heal from: "
                "regrow protects data-parallel models (DistributedDataParallel) and pipelines of whole stages. "
                "FSDP and tensor parallelism, also within a stage, are not supported yet"
            )
    wrapped = [ddp for module in registry.modules.values() for ddp in find_ddp(module)]
    if any(ddp.static_graph for ddp in wrapped):
        # its first backward has a collective more, which a replacement would wait for alone
        raise ValueError(
            "DistributedDataParallel with static_graph=True is not supported yet: leave it off "
            "(find_unused_parameters and gradient_as_bucket_view may stay)"
        )
    if wait_free:
        _check_wait_free(registry, wrapped)
        if staged:
            raise ValueError("protect(wait_free=True) is not supported together with stage= yet: use one or the other")


def _check_wait_free(registry: Registry, wrapped: list[DistributedDataParallel]) -> None:
    if not wrapped:
        raise ValueError("protect(wait_free=True) needs a DistributedDataParallel model and its optimizer")
    if any(ddp.find_unused_parameters for ddp in wrapped):
        raise ValueError(
            "protect(wait_free=True): with find_unused_parameters=True it is not known during backward which "
            "parameters must not be updated; use one or the other"
        )
    if any(isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in registry.shared.values()):
        raise ValueError(
            "protect(wait_free=True): a GradScaler unscales gradients after backward, when wait-free updates have "
            "used them already; use one or the other"
        )
