"""Memory of a fixed size for records, in segments: handed out, written to disk when it runs short, used again.

Knows nothing of steps, waits for nothing and has no thread: whoever calls holds the journal's lock, unless the function
says otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regrow.journal import record
from regrow.journal.record import Channel

_SPARE_BYTES = 1 << 30


@dataclass(eq=False)
class Segment:
    """A piece of memory, or of disk, with whole records one behind the other."""

    number: int
    memory: np.ndarray[Any, np.dtype[np.uint8]] | None
    tensor: torch.Tensor | None
    size: int
    used: int = 0
    entries: list[Entry] = field(default_factory=list)
    wanted: int = 0
    """How many of its records may still be asked for."""
    pinned: int = 0
    """How many of its records are being sent right now: their memory stays as it is."""
    path: Path | None = None
    full: bool = False


@dataclass(eq=False)
class Entry:
    """Where a record lies."""

    segment: Segment
    start: int
    length: int
    description: bytes
    payload_bytes: int
    step: int
    channel: Channel
    sealed: bool = False
    wanted: bool = True


@dataclass(frozen=True)
class Pin:
    """A message in the journal's own memory, which stays there unchanged until ``unpin``: it can be sent from there."""

    tensor: torch.Tensor
    entry: Entry


class Segments:
    """All segments of one journal, oldest first."""

    def __init__(self, directory: Path, memory_bytes: int, segment_bytes: int) -> None:
        if memory_bytes < 4 * segment_bytes:
            segment_bytes = max(record.ALIGN, memory_bytes // 4)
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._segment_bytes = segment_bytes
        self._all: deque[Segment] = deque()
        self._last: Segment | None = None
        self._free: list[tuple[np.ndarray[Any, np.dtype[np.uint8]], torch.Tensor]] = []
        self._count = 0
        self._pinned_bytes = 0
        """Sizes of all segments with a record that is pinned."""
        self.in_memory = 0
        """Memory held now, free segments included."""

    # handing out -----------------------------------------------------------------------------------------------------

    def open_for(self, length: int) -> Segment | None:
        """Return the segment that is written to, if so many bytes fit into it. Without the lock, by whoever appends."""
        last = self._last
        return last if last is not None and last.size - last.used >= length else None

    def finish(self) -> None:
        """The segment that is written to is full, whatever room is left in it."""
        if self._last is not None:
            self._last.full = True
            self._last = None

    def fits(self, length: int) -> bool:
        """Whether a new segment for so many bytes keeps within the bound."""
        size = max(self._segment_bytes, length)
        if size == self._segment_bytes and self._free:
            return True
        while self._free and self.in_memory + size > self._memory_bytes:  # too small for this one: give them back
            self._free.pop()
            self.in_memory -= self._segment_bytes
        return self.in_memory + size <= self._memory_bytes

    def add(self, length: int) -> Segment:
        """Return a new segment for so many bytes or more."""
        size = max(self._segment_bytes, length)
        if self._free and size == self._segment_bytes:
            memory, tensor = self._free.pop()
        else:
            tensor = torch.zeros(size, dtype=torch.uint8)  # touched now, not while the step waits for a page
            memory = tensor.numpy()
            self.in_memory += size
        segment = Segment(self._count, memory, tensor, size)
        self._count += 1
        self._all.append(segment)
        self._last = segment
        return segment

    # records ---------------------------------------------------------------------------------------------------------

    def take_in(self, entry: Entry) -> None:
        """A record is in place, behind the others of its segment."""
        segment = entry.segment
        segment.used += entry.length
        segment.entries.append(entry)
        segment.wanted += 1

    def seal(self, entry: Entry) -> None:
        """Add a record's checksum, unless it is there."""
        if entry.sealed or entry.segment.memory is None:
            return
        memory = entry.segment.memory.data[entry.start : entry.start + entry.length]
        record.seal(memory, entry.description, entry.payload_bytes)
        entry.sealed = True

    def read(self, entry: Entry) -> bytes:
        """Return a record as it lies there, damage included; ``OSError`` if its file is gone."""
        segment = entry.segment
        if segment.memory is not None:
            return segment.memory[entry.start : entry.start + entry.length].tobytes()
        assert segment.path is not None
        with segment.path.open("rb") as file:
            file.seek(entry.start)
            return file.read(entry.length)

    def pin(self, entry: Entry) -> bool:
        """Let a record's memory stay as it is; not if too much is pinned already to keep within the bound.

        One record holds all of its segment's memory, and so that is what counts.
        """
        segment = entry.segment
        if not segment.pinned:
            if self._pinned_bytes + segment.size > self._memory_bytes // 4:
                return False
            self._pinned_bytes += segment.size
        segment.pinned += 1
        return True

    def unpin(self, entry: Entry) -> None:
        """A record that was pinned may go."""
        segment = entry.segment
        segment.pinned -= 1
        if not segment.pinned:
            self._pinned_bytes -= segment.size

    def release(self, entries: Iterable[Entry]) -> None:
        """Nobody will ask for these records any more; ``sweep`` frees what that leaves."""
        for entry in entries:
            entry.wanted = False
            entry.segment.wanted -= 1

    def sweep(self) -> None:
        """Free segments in which nothing is wanted any more; the newest is still written to."""
        kept: deque[Segment] = deque()
        for segment in self._all:
            if segment.wanted or segment.pinned or not segment.full:
                kept.append(segment)
                continue
            self._remove(segment.path)
            self._recycle(segment)
        self._all = kept

    def _recycle(self, segment: Segment) -> None:
        if segment.memory is None or segment.tensor is None:
            return
        if segment.size == self._segment_bytes and self.in_memory <= self._memory_bytes:
            self._free.append((segment.memory, segment.tensor))
        else:
            self.in_memory -= segment.size
        segment.memory = segment.tensor = None

    # the disk --------------------------------------------------------------------------------------------------------

    @property
    def scarce(self) -> bool:
        """Whether less than half of the memory is free."""
        return self.in_memory - len(self._free) * self._segment_bytes > self._memory_bytes // 2

    def oldest(self, unless: Callable[[Segment], bool]) -> Segment | None:
        """Return the oldest full segment in memory that is neither pinned nor ``unless``."""
        for segment in self._all:
            if segment.full and segment.memory is not None and not segment.pinned and not unless(segment):
                return segment
        return None

    def write(self, segment: Segment) -> Path | None:
        """Write a segment to disk, without the lock. Return where, or ``None`` if it is not in memory any more.

        ``OSError`` if the disk does not take it; nothing is left there then.
        """
        memory = segment.memory  # what is freed meanwhile and used again is written in vain, and ``settle`` sees that
        if memory is None:
            return None
        path = self._directory / f"segment-{segment.number}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            leave_room(self._directory, segment.used)
            with path.open("wb", buffering=0) as file:
                left = memory.data[: segment.used]
                while left:
                    left = left[file.write(left) :]
        except OSError:
            self._remove(path)
            raise
        return path

    def settle(self, segment: Segment, path: Path) -> bool:
        """A segment was written: its memory is free. Returns whether it is wanted still."""
        if segment not in self._all:  # dropped meanwhile
            self._remove(path)
            return False
        segment.path = path
        self._recycle(segment)
        return True

    def clear(self) -> None:
        """Forget all, on disk, too."""
        for segment in self._all:
            self._remove(segment.path)
        self._all.clear()
        self._last = None

    @staticmethod
    def _remove(path: Path | None) -> None:
        """Remove a file. A disk that does not even let go of one must not end the training."""
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()


def leave_room(directory: Path, nbytes: int) -> None:
    """Refuse to take the last of a disk: the run's logs and events are most likely there, too."""
    disk = os.statvfs(directory)
    spare = min(_SPARE_BYTES, disk.f_blocks * disk.f_frsize // 20)  # 0 where the size is not known
    if spare and disk.f_bavail * disk.f_frsize < nbytes + spare:
        last = f"the last {spare / (1 << 20):.1f} MB are left for logs"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {last}")
