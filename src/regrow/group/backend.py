"""Make ``regrow`` a backend of torch.distributed, once per process. The fabric installed last owns new groups."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from regrow.group.healing import HealingGroup

if TYPE_CHECKING:
    from regrow.group.fabric import Fabric

NAME = "regrow"
_owner: Fabric | None = None


def _create(options: Any, _backend_options: Any) -> HealingGroup:
    if _owner is None:
        raise ValueError("backend 'regrow' has no owner in this process: call regrow.init() first")
    return _owner.create(
        name=options.group_id,
        rank=options.group_rank,
        size=options.group_size,
        store=options.store,
        timeout=options.timeout,
    )


def install(owner: Fabric) -> None:
    """Register the backend if it is not, and make ``owner`` the one that new groups belong to."""
    global _owner
    _owner = owner
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    _admit_monitored_barrier()


def uninstall(owner: Fabric) -> None:
    """Give the backend up, if it is still this fabric's."""
    global _owner
    if _owner is owner:
        _owner = None


def _admit_monitored_barrier() -> None:
    """torch refuses ``monitored_barrier`` for every backend not named gloo, before it asks the group."""
    original = distributed_c10d.monitored_barrier
    forward: Any = vars(HealingGroup)["monitored_barrier"]

    @functools.wraps(original)
    def monitored_barrier(
        group: dist.ProcessGroup | None = dist.GroupMember.WORLD,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> Any:
        target: Any = dist.group.WORLD if group is None else group
        if not isinstance(target, HealingGroup):
            return original(group, timeout, wait_all_ranks)
        limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout or target.timeout
        return forward(target, limit, wait_all_ranks=wait_all_ranks)

    distributed_c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier
