"""The GPU half of a group: a ``ProcessGroupNCCL`` beside gloo, per generation.

UNTESTED: written against the documented interface of ``ProcessGroupNCCL`` on a machine without GPUs. It is kept thin so
that little can be wrong: connecting is lazy in NCCL, aborting is NCCL's own, and nothing here touches sockets.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, Store


def usable() -> bool:
    """Whether this process has GPUs and an NCCL to drive them."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def connect(store: Store, rank: int, size: int, timeout: timedelta, name: str) -> Any:
    """Return the NCCL backend of one group; its communicator forms at the first operation."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = GroupName(name)
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    backend._set_sequence_number_for_group()
    return backend


def abort(backend: Any) -> None:
    """Abort the communicators, which ends kernels that wait for a dead peer."""
    with contextlib.suppress(RuntimeError):  # an abort that fails leaves NCCL's own watchdog
        backend.abort()


def intact(backend: Any) -> bool:
    """Whether NCCL has seen no error on this backend."""
    error = getattr(backend, "get_error", None)
    return error is None or getattr(error(), "name", "SUCCESS") == "SUCCESS"
