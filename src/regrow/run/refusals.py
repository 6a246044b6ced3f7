"""Refuses, when it is protected, what could not be healed: a sentence now instead of a failure after a crash.

Looks at what the run was given, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from regrow import undo
from regrow.ddp import find_ddp
from regrow.rules import Policy
from regrow.state.registry import Registry
from regrow.state.shards import is_zero


def check(registry: Registry, *, wait_free: bool, staged: bool) -> None:
    """``ValueError``, or ``UndoUnsupported``, with what is wrong and what to do instead."""
    for name, module in registry.modules.items():
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
            raise ValueError(
                f"protect({name}=...): FullyShardedDataParallel gives every rank other parameters, which look like "
                "replicas from outside: shard with torch.distributed.fsdp.fully_shard instead"
            )
    if registry.sharded:
        _check_sharded(
            registry, wait_free=wait_free, staged=staged
        )  # goes back to snapshots: no update is ever taken back
    else:
        for optimizer in registry.optimizers.values():
            undo.check_supported(optimizer)
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


def check_policy(policy: Policy, *, staged: bool) -> None:
    """The same for what a policy cannot do."""
    if staged and policy is Policy.COMMIT:
        raise ValueError(
            "--policy commit does not know pipelines (protect(stage=...)): compare with --policy checkfreq or restart"
        )


def check_policies(told: Sequence[Sequence[Any]]) -> None:
    """Refuse hosts that would meet a loss differently: each rank's policy, and how often it commits."""
    for rank, (policy, every) in enumerate(told):
        if [policy, every] != [*told[0]]:
            first = " ".join(str(word) for word in told[0] if word is not None)
            other = " ".join(str(word) for word in (policy, every) if word is not None)
            raise ValueError(
                f"rank 0 was started with --policy {first}, rank {rank} with {other}: give all hosts the same "
                "--policy and --commit-every"
            )


def check_checkpointing(told: Sequence[Sequence[Any] | None]) -> None:
    """Refuse hosts that would write checkpoints at different steps: whether, how often, and what sets the budget."""
    for rank, one in enumerate(told):
        if one == told[0]:
            continue
        if one is None or told[0] is None:
            have, lack = (0, rank) if one is None else (rank, 0)
            raise ValueError(f"rank {have} was started with --ckpt-dir, rank {lack} without: give it to all hosts")
        flags = ("--ckpt-every", "--ckpt-overhead", "--mtbf")
        flag, first, other = next(row for row in zip(flags, told[0], one, strict=True) if row[1] != row[2])
        words = ["auto" if value is None else f"{value:g}" for value in (first, other)]
        raise ValueError(
            f"rank 0 was started with {flag} {words[0]}, rank {rank} with {words[1]}: give all hosts the same"
        )


def _check_sharded(registry: Registry, *, wait_free: bool, staged: bool) -> None:
    for optimizer in registry.optimizers.values():
        if is_zero(optimizer) and getattr(optimizer, "_overlap_with_ddp", False):
            raise ValueError(
                "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates while backward goes on, before a snapshot is "
                "sure to be taken: leave it off"
            )
    if staged:
        raise ValueError(
            "protect(stage=...): the parameters are sharded over ranks. FSDP and tensor parallelism within a stage of "
            "a pipeline are not supported yet: use pipelines of whole stages, or sharding without stage="
        )
    if wait_free:
        raise ValueError("protect(wait_free=True) is for DistributedDataParallel: leave it out with sharded parameters")


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
