"""The control plane's store: the seam that any store can fill, and the one in memory that node 0's agent hosts.

It holds the world, who has joined, the set-up records and the workers' own keys. No training step touches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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


class ControlStore(Protocol):
    """What the agents ask of a store. Every method may raise ``StoreLost``."""

    async def get(self, key: str) -> Entry | None:
        """Return what the key holds, or None."""
        ...

    async def put(self, key: str, value: bytes) -> int:
        """Write whatever was there before; return the new version."""
        ...

    async def compare_and_set(self, key: str, version: int, value: bytes) -> int | None:
        """Write only if the key is still at ``version`` (0: absent); return the new version, or None if it is not."""
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


class MemoryStore:
    """A ``ControlStore`` in this process. Its methods do not suspend, so each one is atomic in the event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._version = 0
        self._watchers: dict[asyncio.Queue[Change], str] = {}

    def _write(self, key: str, value: bytes | None) -> int:
        self._version += 1
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

    async def put(self, key: str, value: bytes) -> int:
        """See ``ControlStore``."""
        return self._write(key, value)

    async def compare_and_set(self, key: str, version: int, value: bytes) -> int | None:
        """See ``ControlStore``."""
        entry = self._entries.get(key)
        if (0 if entry is None else entry.version) != version:
            return None
        return self._write(key, value)

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
