"""The control plane's store: the seam that any store can fill, and the one in memory that node 0's agent hosts.

It holds the world, who has joined, the set-up records and the workers' own keys. No training step touches it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """A value and the revision that wrote it. Revisions only grow, over all keys, also past a delete."""

    value: bytes
    version: int


class Change(NamedTuple):
    """What a watcher sees: ``value`` is None if the key was deleted."""

    key: str
    value: bytes | None
    version: int


class StoreLost(Exception):
    """The store cannot be reached any more."""


class LeaseLost(Exception):
    """The lease under which something was to be written has expired or was revoked: nothing was written."""


class Lease(Protocol):
    """Keys written under it live as long as somebody renews it; the store's clock counts.

    It belongs to the store and not to a connection: a holder that is cut off loses it only when its time is over.
    """

    ttl_s: float
    """How long it lives without being renewed; a store may have rounded up what was asked for."""
    number: int
    """Its name in the store, which no other lease ever has."""

    async def keep(self) -> bool:
        """Renew it; False if it has expired meanwhile, and its keys with it."""
        ...

    async def revoke(self) -> None:
        """End it: its keys vanish at once."""
        ...


class ControlStore(Protocol):
    """What the agents ask of a store. Every method, a lease's included, may raise ``StoreLost``."""

    async def get(self, key: str) -> Entry | None:
        """Return what the key holds, or None."""
        ...

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """Write whatever was there before; return the new version.

        The key hangs on ``lease`` from now on and on no other, also if it did before. ``LeaseLost`` if that is over.
        """
        ...

    async def compare_and_set(self, key: str, version: int, value: bytes, lease: Lease | None = None) -> int | None:
        """Write only if the key is still at ``version`` (0: absent); return the new version, or None if it is not.

        ``lease`` as in ``put``.
        """
        ...

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete the key, or every key that begins with it; return how many there were."""
        ...

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``."""
        ...

    def watch(self, prefix: str) -> AsyncIterator[Change]:
        """Yield first what is there, then every change, in order and without a gap. Ends only by being closed."""
        ...

    async def grant(self, ttl_s: float) -> Lease:
        """Return a new lease that expires ``ttl_s`` seconds from now unless it is kept."""
        ...

    async def revoke(self, number: int) -> None:
        """End the lease with this number, whoever holds it; nothing happens if it is over."""
        ...


class Timer(Protocol):
    """What ``Clock.call_at`` returns."""

    def cancel(self) -> None:
        """Let the callback not happen."""
        ...


class Clock(Protocol):
    """What leases run by: the event loop, or in tests a clock that is turned by hand."""

    def time(self) -> float:
        """Return the seconds since some moment."""
        ...

    def call_at(self, when: float, callback: Callable[[], object], /) -> Timer:
        """Call back when ``time()`` has come to ``when``."""
        ...


class MemoryLease:
    """A ``Lease`` of a ``MemoryStore``."""

    def __init__(self, store: MemoryStore, number: int, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.number = number
        self.keys: dict[str, None] = {}  # in the order in which they were written
        self.due = 0.0
        self.timer: Timer | None = None
        self._store = store

    async def keep(self) -> bool:
        """See ``Lease``."""
        return self._store.renew(self)

    async def revoke(self) -> None:
        """See ``Lease``."""
        self._store.end(self)


class MemoryStore:
    """A ``ControlStore`` in this process. Its methods do not suspend, so each one is atomic in the event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._version = 0
        self._watchers: dict[asyncio.Queue[Change], str] = {}
        self._numbers = itertools.count(1)
        self._leases: dict[int, MemoryLease] = {}
        self._hangs_on: dict[str, MemoryLease] = {}

    def _write(self, key: str, value: bytes | None, lease: MemoryLease | None = None) -> int:
        self._version += 1
        if (old := self._hangs_on.pop(key, None)) is not None:
            del old.keys[key]
        if lease is not None:
            self._hangs_on[key] = lease
            lease.keys[key] = None
        if value is None:
            del self._entries[key]
        else:
            self._entries[key] = Entry(value, self._version)
        for queue, prefix in self._watchers.items():
            if key.startswith(prefix):
                queue.put_nowait(Change(key, value, self._version))
        return self._version

    async def get(self, key: str) -> Entry | None:
        """See ``ControlStore``."""
        return self._entries.get(key)

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """See ``ControlStore``."""
        return self._write(key, value, self._living(lease))

    async def compare_and_set(self, key: str, version: int, value: bytes, lease: Lease | None = None) -> int | None:
        """See ``ControlStore``."""
        living = self._living(lease)
        entry = self._entries.get(key)
        if (0 if entry is None else entry.version) != version:
            return None
        return self._write(key, value, living)

    def forget(self, key: str) -> None:
        """Delete a key from where nothing can be awaited."""
        if key in self._entries:
            self._write(key, None)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """See ``ControlStore``."""
        doomed = await self.keys(key) if prefix else [key] if key in self._entries else []
        for name in doomed:
            self._write(name, None)
        return len(doomed)

    async def keys(self, prefix: str) -> list[str]:
        """See ``ControlStore``."""
        return [key for key in self._entries if key.startswith(prefix)]

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        """See ``ControlStore``."""
        queue: asyncio.Queue[Change] = asyncio.Queue()
        for key, entry in sorted(self._entries.items(), key=lambda item: item[1].version):
            if key.startswith(prefix):
                queue.put_nowait(Change(key, entry.value, entry.version))
        self._watchers[queue] = prefix
        try:
            while True:
                yield await queue.get()
        finally:
            del self._watchers[queue]

    # ------------------------------------------------------------------ leases

    async def grant(self, ttl_s: float) -> MemoryLease:
        """See ``ControlStore``."""
        if ttl_s <= 0:
            raise ValueError(f"a lease needs a positive time to live, got {ttl_s}")
        lease = MemoryLease(self, next(self._numbers), ttl_s)
        self._leases[lease.number] = lease
        self._start(lease)
        return lease

    async def revoke(self, number: int) -> None:
        """See ``ControlStore``."""
        if (lease := self._leases.get(number)) is not None:
            self.end(lease)

    def lease(self, number: int) -> MemoryLease | None:
        """Return the living lease with this number."""
        return self._leases.get(number)

    def renew(self, lease: MemoryLease) -> bool:
        """Let a living lease begin anew; False if it does not live any more."""
        if lease.number not in self._leases:
            return False
        self._start(lease)
        return True

    def end(self, lease: MemoryLease) -> None:
        """End a lease and delete its keys."""
        if self._leases.pop(lease.number, None) is None:
            return
        if lease.timer is not None:
            lease.timer.cancel()
        for key in list(lease.keys):
            self._write(key, None)

    def _start(self, lease: MemoryLease) -> None:
        clock = self._clock or asyncio.get_running_loop()
        if lease.timer is not None:
            lease.timer.cancel()
        lease.due = clock.time() + lease.ttl_s
        lease.timer = clock.call_at(lease.due, lambda: self._expire(lease))

    def _expire(self, lease: MemoryLease) -> None:
        clock = self._clock or asyncio.get_running_loop()
        if clock.time() - lease.due > lease.ttl_s / 2:
            self._start(lease)  # the store itself stood still: renewals may lie unread
        else:
            self.end(lease)

    def _living(self, lease: Lease | None) -> MemoryLease | None:
        if lease is None:
            return None
        if not isinstance(lease, MemoryLease) or self._leases.get(lease.number) is not lease:
            raise LeaseLost("the lease is over")
        return lease
