"""One generation's connections: a gloo device, the groups that were connected on it, and the end of all of them.

Never reused: a new generation is a new object with a new listening port and a new prefix in the store. ``end`` may be
called from any thread and does not block; connecting blocks and belongs in a helper thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, PrefixStore, Store

from regrow.errors import PeerLost
from regrow.group import helpers, nccl, sockets
from regrow.group.meeting import MeetingStore
from regrow.group.work import Promise

GRACE_S = 0.3
"""How long gloo has, after its connections were ended, to tell those who wait: it takes milliseconds if it does."""


class Inner:
    """A connected group of one generation: torch's own ``ProcessGroup`` over gloo (and nccl where there are GPUs)."""

    def __init__(self, group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo, cuda: Any) -> None:
        self.group = group
        self.gloo = gloo
        self.cuda = cuda


class Network:
    """The sockets of one generation in this process.

    Written by the connecting thread (names, connections), read by any thread: attributes are replaced, never changed.
    """

    def __init__(self, *, generation: int, store: Store, host_addr: str, user_timeout_s: float) -> None:
        self.generation = generation
        self.ended = threading.Event()
        self._ended_t = float("inf")
        self.outstanding: set[Promise] = set()
        self.names = sockets.Names()
        self._store = store
        self._host_addr = host_addr
        self._user_timeout_s = user_timeout_s
        self._device: Any = None
        self._connections: dict[str, frozenset[sockets.Connection]] = {}
        self._cuda: tuple[Any, ...] = ()
        self._lock = threading.Lock()  # for the names, which two connecting threads may extend
        self._connecting = 0

    def _on_address(self, own: bool, blob: bytes) -> None:
        address = sockets.parse_listener(blob)
        with self._lock:
            names = self.names
            if own:
                self.names = sockets.Names(names.own | {address}, names.peers)
            elif address not in names.own:
                self.names = sockets.Names(names.own, names.peers | {address})

    def connect(self, name: str, rank: int, size: int, timeout: timedelta, deadline: float) -> Inner:
        """Connect one group, all pairs, and make sure that each pair leads to the right rank of this generation.

        Blocks (in C++) for as long as peers are missing, up to ``timeout``: whoever must not wait runs it in a thread.
        """
        if self.ended.is_set():
            raise PeerLost(f"generation {self.generation} has ended", generation=self.generation)
        with self._reachable():
            return self._connect(name, rank, size, timeout, deadline)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        """Let peers, and whoever else finds the port, connect to this process for as long as a group is connecting.

        A peer reads where it must connect to only after this rank has entered: it never finds the port barred.
        """
        with self._lock:
            self._connecting += 1
            if self._connecting == 1:
                sockets.unbar(sockets.find(self.names))
        try:
            yield
        finally:
            with self._lock:
                self._connecting -= 1
                if not self._connecting:
                    sockets.bar(sockets.find(self.names))

    def _connect(self, name: str, rank: int, size: int, timeout: timedelta, deadline: float) -> Inner:
        if self._device is None:
            self._device = dist.ProcessGroupGloo.create_device(hostname=self._host_addr, lazy_init=False)
        prefix = f"gen{self.generation}/{name}/"
        meeting = MeetingStore(
            self._store, prefix=prefix, ended=self.ended, deadline=deadline, on_address=self._on_address
        )
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = timeout
        gloo = dist.ProcessGroupGloo(meeting, rank, size, options)
        gloo._set_sequence_number_for_group()
        group = dist.ProcessGroup(meeting, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        cuda = None
        if nccl.usable():
            cuda = nccl.connect(PrefixStore(f"{prefix}cuda/", self._store), rank, size, timeout, name)
            group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, cuda)
            self._cuda += (cuda,)
        group._set_group_name(GroupName(name))
        group._set_group_desc("regrow")
        if size > 1:
            self._verify(group, name, rank, size, deadline)
        self._enter(name)
        if self.ended.is_set():
            raise PeerLost(f"generation {self.generation} ended while {name!r} connected", generation=self.generation)
        return Inner(group, gloo, cuda)

    def _verify(self, group: dist.ProcessGroup, name: str, rank: int, size: int, deadline: float) -> None:
        """Exchange (generation, rank) over every pair: ports are used again, so an address proves nothing."""
        sent = torch.tensor([[self.generation, rank]] * size, dtype=torch.int64)
        got = torch.empty_like(sent)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        group.alltoall_base(got, sent, [], [], options).wait()
        wanted = [[self.generation, peer] for peer in range(size)]
        if got.tolist() != wanted:
            raise PeerLost(
                f"group {name!r} of generation {self.generation} met a stranger: {got.tolist()}",
                generation=self.generation,
            )

    def _enter(self, name: str) -> None:
        """Note which connections are the new group's: those that no group has yet, since groups connect one by one."""
        found = sockets.find(self.names)
        sockets.tune(found, self._user_timeout_s)
        known = frozenset[sockets.Connection]().union(*self._connections.values())
        fresh = frozenset(connection for connection in found if not connection.listening) - known
        self._connections = {**self._connections, name: fresh}

    def intact(self) -> bool:
        """Whether every connection that was made is still up."""
        if self.ended.is_set():
            return False
        up = all(sockets.is_up(connection) for group in self._connections.values() for connection in group)
        return up and all(nccl.intact(backend) for backend in self._cuda)

    def unsent(self) -> int:
        """Return how much of what groups have sent is still on its way."""
        return sum(sockets.unsent(connection) for group in self._connections.values() for connection in group)

    def end(self) -> None:
        """Wake whoever is blocked on this generation, and let no one start on it. From any thread; quick."""
        first = not self.ended.is_set()
        if first:
            self._ended_t = time.monotonic()
        self.ended.set()
        sockets.sever(self.names)
        if first:
            self.give_up_soon()
        for backend in self._cuda:
            nccl.abort(backend)

    def given_up(self) -> bool:
        """Whether the end is so long ago that what still waits was forgotten by gloo."""
        return time.monotonic() - self._ended_t > GRACE_S

    def give_up_soon(self) -> None:
        """Let go, in a moment, of the operations that gloo has forgotten."""
        if self.outstanding:
            helpers.start("regrow-give-up", self._give_up)

    def _give_up(self) -> None:
        time.sleep(GRACE_S)
        for promise in list(self.outstanding):
            promise.give_up()

    def close(self) -> None:
        """Let go of the device before its groups go: it ends (in 10 ms) with the last of them, without the GIL."""
        self._device = None
        self._cuda = ()

    def end_group(self, name: str) -> None:
        """Wake everyone who is blocked on one group; the generation is not intact from then on."""
        sockets.sever_these(self._connections.get(name, frozenset()))

    def forget(self, name: str) -> None:
        """Watch a group's connections no more: it was shut down on purpose."""
        self._connections = {group: found for group, found in self._connections.items() if group != name}
