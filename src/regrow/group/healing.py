"""The process group that user code holds: the same object, rank and size through every generation.

Everything torch may call on a process group is forwarded to the group of the current generation, or, in a set-up, to
its record. It never connects, waits or decides on its own: the fabric that owns it does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from regrow.errors import PeerLost
from regrow.group import nccl
from regrow.group.network import Inner, Network
from regrow.group.work import LiveMessage, LiveWork

if TYPE_CHECKING:
    from regrow.group.fabric import Fabric

OPERATIONS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
    "send",
    "recv",
    "recv_anysource",
)
MESSAGES = ("send", "recv", "recv_anysource")
DEAF = (*MESSAGES, *(name for name in OPERATIONS if "reduce_scatter" in name))
"""Operations whose handles cannot be asked to wait for a moment: gloo's ends the connection, or waits for ever."""


def live(name: str, work: dist.Work, network: Network) -> LiveWork:
    """Return the handle of an operation that gloo has begun."""
    return (LiveMessage if name in DEAF else LiveWork)(work, network)


class Watcher(Protocol):
    """Hears of the sums of one tensor that are issued on a group, in the thread that issues them."""

    def summing(self, tensor: torch.Tensor) -> None:
        """It is about to be issued."""

    def issued(self, tensor: torch.Tensor, work: dist.Work) -> None:
        """It is under way."""


class HealingGroup(dist.ProcessGroup):
    """A group of backend ``regrow``. ``inner`` is the live group of this generation; ``None`` while there is none.

    ``meeting`` names it in the store: like torch's name, but never used twice in a process.
    """

    def __init__(
        self,
        fabric: Fabric,
        *,
        name: str,
        meeting: str,
        rank: int,
        size: int,
        store: Store | None,
        timeout: timedelta,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._fabric = fabric
        self._rank, self._size = rank, size
        self._store = store
        self._name, self._desc = name, "undefined"
        self.meeting = meeting
        self.timeout = timeout
        self.inner: dist.ProcessGroup | None = None
        self.connected: Inner | None = None
        self.network: Any = None
        self._bound_device: torch.device | None = None
        self.watchers: list[Watcher] = []

    # -- generations: called by the fabric

    def attach(self, connected: Inner, network: Network) -> None:
        """Take the group of a new generation into use."""
        self.connected, self.network, self.inner = connected, network, connected.group

    def detach(self) -> Inner | None:
        """Give the old generation's group away; from now on operations raise ``PeerLost``."""
        connected, self.connected, self.inner = self.connected, None, None
        if connected is not None:
            self.timeout = connected.gloo.options._timeout  # torch may have set another one on the backend itself
        return connected

    def handle(self, name: str, work: Any) -> Any:
        """Return what the caller of an operation gets: a handle that the end of the generation always wakes."""
        if not isinstance(work, dist.Work):  # gloo's monitored_barrier is over when it returns
            return work
        return live(name, work, self.network)

    # -- who we are

    def getBackendName(self) -> str:
        """Return the backend's name, as C++ asks for it."""
        return "regrow"

    name = getBackendName

    def _get_backend_name(self) -> str:
        return "gloo"  # what torch's own sharding code asks to tell host memory from device memory

    def size(self) -> int:
        """Return the number of members, which never changes."""
        return self._size

    def rank(self) -> int:
        """Return this process's rank in the group, which never changes."""
        return self._rank

    getSize = size
    getRank = rank

    @property
    def group_name(self) -> GroupName:
        """The name that torch gave; the same in every process and after every failure."""
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        """The description that torch gave."""
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        """Return the name, as C++ asks for it."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the description, as C++ asks for it."""
        return self._desc

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    def get_group_store(self) -> Store:
        """Return the store that torch made for this group."""
        if self._store is None:
            raise RuntimeError(f"group {self._name!r} was made without a store")
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("cuda")] if nccl.usable() else [torch.device("cpu")]

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device that ``init_process_group(device_id=...)`` named."""
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device

    def _get_backend(self, device: torch.device) -> Any:
        """Return the live backend for a device, or this group where a replacement has none yet."""
        wanted = torch.device(device).type
        if wanted not in {known.type for known in self._device_types}:
            raise RuntimeError(f"No backend type associated with device type {wanted}")
        if self.connected is None:
            return self
        return self.connected.cuda if wanted == "cuda" else self.connected.gloo

    # -- what a backend says about itself, for a set-up that has no live one

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tensors come from torch's allocator."""
        return False

    # -- the rest of the interface

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of operations, in this and later generations."""
        self.timeout = timeout
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Each generation's group sets its own."""

    def _get_sequence_number_for_group(self) -> int:
        inner: Any = self.inner
        return int(inner._get_sequence_number_for_group()) if inner is not None else 0

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        """gloo keeps none that could be waited for."""

    def _enable_collectives_timing(self) -> None:
        inner: Any = self.inner
        if inner is not None:
            inner._enable_collectives_timing()

    def _start_coalescing(self, device: torch.device) -> None:
        self._live()._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._live()._end_coalescing(device)

    def _live(self) -> dist.ProcessGroup:
        if self.inner is None:
            raise PeerLost(f"group {self._name!r} is not connected", generation=self._fabric.generation)
        return self.inner

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> HealingGroup | None:
        """Make a group of some of this group's ranks; ``None`` where this process is not among them."""
        members = list(ranks)
        name = group_name if group_name is not None else f"{self._name}:split:{'-'.join(map(str, members))}"
        if self._rank not in members:
            return None
        group = self._fabric.create(
            name=name,
            rank=members.index(self._rank),
            size=len(members),
            store=None if self._store is None else PrefixStore(f"{name}/", self._store),
            timeout=timeout if timeout is not None else self.timeout,
        )
        group._set_group_desc(group_desc if group_desc is not None else f"{self._desc}:split")
        return group

    splitGroup = split_group

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        """Refuse: the members of a healing group are fixed."""
        raise RuntimeError("a regrow group keeps its members: merge_remote_group is not supported")

    mergeRemoteGroup = merge_remote_group

    def abort(self) -> None:
        """Wake whoever is blocked in this group; it works again after the next reconnection."""
        self._fabric.end_group(self)

    def shutdown(self) -> None:
        """Leave for good, as ``destroy_process_group`` asks."""
        self._fabric.retire(self)

    def __repr__(self) -> str:
        state = "live" if self.inner is not None else "not connected"
        return f"<HealingGroup {self._name!r} rank {self._rank} of {self._size}, {state}>"


def _forward(name: str) -> Callable[..., Any]:
    """Make the method for one operation: as little as possible between the caller and gloo when all is well."""

    def operation(self: HealingGroup, *args: Any, **kwargs: Any) -> Any:
        fabric = self._fabric
        inner = self.inner
        if not fabric.plain or inner is None:
            return fabric.issue(self, name, args, kwargs)
        hook = fabric.before_collective
        if hook is not None:
            hook(name)
        fabric.ops_issued += 1
        fabric.last_work = work = getattr(inner, name)(*args, **kwargs)
        handle = self.handle(name, work)
        if fabric.activity is not None and name not in MESSAGES:
            fabric.activity.watch(work, handle)
        return handle

    operation.__name__ = name
    operation.__qualname__ = f"HealingGroup.{name}"
    operation.__doc__ = f"Forward ``{name}`` to the live group, or answer it from the record."
    return operation


def _watched(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Let a group's watchers hear of the sums among its all-reduces."""

    @functools.wraps(operation)
    def allreduce(self: HealingGroup, tensors: Any, opts: Any = None, *args: Any, **kwargs: Any) -> Any:
        given = () if opts is None else (opts,)
        watchers = self.watchers
        if not watchers or not isinstance(tensors, list) or len(tensors) != 1:
            return operation(self, tensors, *given, *args, **kwargs)
        if opts is not None and getattr(opts, "reduceOp", None) != dist.ReduceOp.SUM:
            return operation(self, tensors, *given, *args, **kwargs)
        for watcher in watchers:
            watcher.summing(tensors[0])
        work = operation(self, tensors, *given, *args, **kwargs)
        for watcher in watchers:
            watcher.issued(tensors[0], work)
        return work

    return allreduce


for _name in OPERATIONS:
    setattr(HealingGroup, _name, _forward(_name))
HealingGroup.allreduce = _watched(HealingGroup.allreduce)  # type: ignore[method-assign]
