"""The journal of one rank: what it has sent, by step, in memory of a fixed size that spills to disk.

The training thread copies a message once and goes on. A background thread adds checksums and writes the oldest segments
to disk before memory runs short. When the disk cannot keep up, the training thread waits, and that is reported; when it
cannot be written at all, the oldest steps are given up, and that is said: training never ends for the journal's sake.

Only the training thread begins steps; any thread may append, read, drop and ask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regrow.journal import record
from regrow.journal.record import Channel

SEGMENT_BYTES = 8 << 20
DEFAULT_MEMORY_BYTES = 256 << 20
_SPARE_BYTES = 1 << 30
_WAIT_S = 60.0
_WORTH_SAYING_S = 0.005

Event = Callable[..., None]


@dataclass(eq=False)
class _Segment:
    """A piece of memory, or of disk, with whole records one behind the other."""

    number: int
    memory: np.ndarray[Any, np.dtype[np.uint8]] | None
    tensor: torch.Tensor | None
    size: int
    used: int = 0
    entries: list[_Entry] = field(default_factory=list)
    wanted: int = 0
    """How many of its records may still be asked for."""
    pinned: int = 0
    """How many of its records are being sent right now: their memory stays as it is."""
    path: Path | None = None
    full: bool = False


@dataclass(eq=False)
class _Entry:
    segment: _Segment
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
    entry: _Entry


class Journal:
    """See the module. ``on_event(name, **fields)`` hears of back-pressure and of what is given up."""

    def __init__(
        self,
        directory: Path,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
        on_event: Event = lambda *_, **__: None,
    ) -> None:
        if memory_bytes < 4 * segment_bytes:
            segment_bytes = max(record.ALIGN, memory_bytes // 4)
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._segment_bytes = segment_bytes
        self._on_event = on_event
        self._changed = threading.Condition()
        self._appending = threading.Lock()  # a collective's result is taken down by whichever thread learns of it
        self._segments: deque[_Segment] = deque()
        self._free: list[tuple[np.ndarray[Any, np.dtype[np.uint8]], torch.Tensor]] = []
        self._in_memory = 0
        self._pinned_bytes = 0
        self._unsealed: deque[_Entry] = deque()
        self._thinned: set[int] = set()
        self._partial: set[int] = set()
        self._index: dict[int, dict[Channel, list[_Entry]]] = {}
        self._count = 0
        self._next = 0
        """The first step that is not complete."""
        self._current = -1
        self._disk_fails = False
        self._from = 0
        self._closed = False
        self.bytes_appended = 0
        """Bytes of messages that were taken down, without their heads."""
        self.waited_s = 0.0
        """How long the training thread had to wait for the disk."""
        self._thread = threading.Thread(target=self._run, name="regrow-journal", daemon=True)
        self._thread.start()

    # the training thread ---------------------------------------------------------------------------------------------

    def start_at(self, step: int) -> None:
        """This rank goes on at ``step``: earlier steps are kept if they are all there, later ones are forgotten.

        A step that was begun and not completed is kept if the state after it was copied from a replica: perhaps all of
        it was sent.
        """
        with self._changed:
            if step == self._next + 1 and self._next in self._index:
                self._partial.add(self._next)
                self._next = step
            gap = step > self._next or step < self._from
            for later in [known for known in self._index if known >= step or gap]:
                self._forget(later)
            if gap:
                self._from = step
            self._next = step

    def begin(self, step: int) -> None:
        """A step begins (again): what an earlier try of it has sent is sent anew."""
        with self._changed:
            self._forget(step)
            self._index[step] = {}
            self._current = step

    def complete(self, step: int) -> None:
        """All of a step is sent."""
        self._next = step + 1

    def append(
        self, generation: int, step: int, channel: Channel, tensor: torch.Tensor, *, pin: bool = False
    ) -> Pin | None:
        """Take down a message. When this returns it is in the journal, whatever the caller does to the tensor.

        With ``pin``, return where it lies, unless too much is pinned already for the memory to stay within its bound.
        """
        with self._appending:
            return self._append(generation, step, channel, tensor, pin)

    def _append(self, generation: int, step: int, channel: Channel, tensor: torch.Tensor, pin: bool) -> Pin | None:
        rows = self._index.setdefault(step, {}).setdefault(channel, [])
        description = record.describe(generation, step, channel, len(rows), tensor)
        payload_bytes = tensor.numel() * tensor.element_size()
        start, length = record.layout(description, payload_bytes)
        segment = self._room(length)
        assert segment.tensor is not None and segment.memory is not None
        base = segment.used
        at = base + record.HEAD_BYTES
        segment.memory[at : at + len(description)] = np.frombuffer(description, dtype=np.uint8)
        place = segment.tensor[base + start : base + start + payload_bytes].view(tensor.dtype).view(tensor.shape)
        if payload_bytes:
            place.copy_(tensor.detach())
        entry = _Entry(segment, base, length, description, payload_bytes, step, channel)
        with self._changed:
            segment.used += length
            segment.entries.append(entry)
            segment.wanted += 1
            rows.append(entry)
            self._unsealed.append(entry)  # sealed within a second, or when asked for: nobody is woken for each message
            self.bytes_appended += payload_bytes
            if not pin or self._pinned_bytes + length > self._memory_bytes // 4:
                return None
            segment.pinned += 1
            self._pinned_bytes += length
            return Pin(place, entry)

    def unpin(self, pins: Iterable[Pin]) -> None:
        """These messages were sent, or their connections are gone."""
        with self._changed:
            for pin in pins:
                pin.entry.segment.pinned -= 1
                self._pinned_bytes -= pin.entry.length
            self._sweep()

    def _room(self, length: int) -> _Segment:
        """Return a segment with room for this many bytes; waits while all memory is taken."""
        last = self._segments[-1] if self._segments else None
        if last is not None and not last.full and last.size - last.used >= length:
            return last
        size = max(self._segment_bytes, length)
        waited = 0.0
        with self._changed:
            if last is not None:
                last.full = True
                self._changed.notify_all()
            began = time.monotonic()
            large = size != self._segment_bytes
            while self._in_memory + size > self._memory_bytes and (large or not self._free):
                if self._free:  # too small for this one: give it back
                    self._free.pop()
                    self._in_memory -= self._segment_bytes
                elif not self._spillable():
                    break
                else:
                    if not self._changed.wait(_WAIT_S):
                        self._give_up_oldest(f"the disk took no segment for {_WAIT_S:.0f} s")
                    waited = time.monotonic() - began
            if self._free and not large:
                memory, tensor = self._free.pop()
            else:
                tensor = torch.zeros(size, dtype=torch.uint8)  # touched now, not while the step waits for a page
                memory = tensor.numpy()
                self._in_memory += size
            segment = _Segment(self._count, memory, tensor, size)
            self._count += 1
            self._segments.append(segment)
        if waited > _WORTH_SAYING_S:
            self.waited_s += waited
            self._on_event("journal_waited", seconds=waited, memory_bytes=self._memory_bytes)
        return segment

    def _spillable(self) -> bool:
        """Whether waiting may help. If the disk fails, what the step in progress has sent can go nowhere."""
        return self._oldest() is not None

    def _oldest(self) -> _Segment | None:
        """Return the oldest full segment in memory that may be written, or, if the disk fails, given up."""
        for segment in self._segments:
            if not segment.full or segment.memory is None or segment.pinned:
                continue
            if not (self._disk_fails and self._is_current(segment)):
                return segment
        return None

    def _is_current(self, segment: _Segment) -> bool:
        return any(entry.wanted and entry.step >= self._current for entry in segment.entries)

    # any thread ------------------------------------------------------------------------------------------------------

    @property
    def kept_from(self) -> int:
        """Everything that was sent in completed steps from this one on is there."""
        return self._from

    @property
    def next_step(self) -> int:
        """The first step that is not complete."""
        return self._next

    @property
    def memory_bytes(self) -> int:
        """Memory held now."""
        return self._in_memory

    def drop_before(self, step: int) -> None:
        """Forget what was sent before a step: a checkpoint of it is committed by everyone."""
        with self._changed:
            for known in [known for known in self._index if known < step]:
                self._forget(known)
            self._from = max(self._from, step)

    def drop_channels(self, step: int, unwanted: Callable[[Channel], bool]) -> None:
        """Forget what was sent in one step on some channels: what stays in its domain is kept for a moment only."""
        with self._changed:
            channels = self._index.get(step, {})
            for channel in [channel for channel in channels if unwanted(channel)]:
                self._release(channels.pop(channel))
                self._thinned.add(step)
            self._sweep()

    def partial(self, step: int) -> bool:
        """Whether a step was not completed here, so that something may be missing of what it sent."""
        return step in self._partial

    def thinned(self, step: int) -> bool:
        """Whether what a step sent within its domain is gone."""
        return step in self._thinned

    def read(self, step: int, peer: int) -> list[bytes]:
        """Return the records of what was sent to a rank (or to all) in a step, as they lie there, damage included."""
        with self._changed:
            rows = [
                entry
                for channel, entries in self._index.get(step, {}).items()
                if channel.peer in (peer, -1)
                for entry in entries
            ]
            for entry in rows:
                self._seal(entry)
            found = []
            for entry in rows:
                segment = entry.segment
                if segment.memory is not None:
                    found.append(segment.memory[entry.start : entry.start + entry.length].tobytes())
                else:
                    assert segment.path is not None
                    with segment.path.open("rb") as file:
                        file.seek(entry.start)
                        found.append(file.read(entry.length))
            return found

    def close(self) -> None:
        """End the background thread and remove what was spilled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5.0)
        for segment in self._segments:
            if segment.path is not None:
                segment.path.unlink(missing_ok=True)
        self._segments.clear()

    # with the lock held ----------------------------------------------------------------------------------------------

    def _forget(self, step: int) -> None:
        for rows in self._index.pop(step, {}).values():
            self._release(rows)
        self._thinned.discard(step)
        self._partial.discard(step)
        self._sweep()

    def _release(self, rows: list[_Entry]) -> None:
        for entry in rows:
            entry.wanted = False
            entry.segment.wanted -= 1

    def _sweep(self) -> None:
        """Free segments in which nothing is wanted any more; the newest is still written to."""
        kept: deque[_Segment] = deque()
        for segment in self._segments:
            if segment.wanted or segment.pinned or not segment.full:
                kept.append(segment)
                continue
            if segment.path is not None:
                segment.path.unlink(missing_ok=True)
            self._recycle(segment)
        self._segments = kept
        self._changed.notify_all()

    def _recycle(self, segment: _Segment) -> None:
        if segment.memory is None or segment.tensor is None:
            return
        if segment.size == self._segment_bytes and self._in_memory <= self._memory_bytes:
            self._free.append((segment.memory, segment.tensor))
        else:
            self._in_memory -= segment.size
        segment.memory = segment.tensor = None

    def _seal(self, entry: _Entry) -> None:
        if entry.sealed or entry.segment.memory is None:
            return
        memory = entry.segment.memory.data[entry.start : entry.start + entry.length]
        record.seal(memory, entry.description, entry.payload_bytes)
        entry.sealed = True

    def _give_up_oldest(self, why: str) -> None:
        """Memory is full and the disk takes nothing: forget the oldest steps rather than stop the training."""
        self._disk_fails = True
        oldest = self._oldest()
        if oldest is None:
            return
        through = max((entry.step for entry in oldest.entries if entry.wanted), default=-1)
        for known in [known for known in self._index if known <= through]:
            for rows in self._index.pop(known).values():
                self._release(rows)
        self._from = max(self._from, through + 1)
        self._sweep()
        if through >= 0:
            self._on_event("journal_given_up", through_step=through, why=why)

    # the background thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._unsealed and self._due() is None:
                    self._changed.wait(1.0)
                if self._closed:
                    return
                entries, self._unsealed = list(self._unsealed), deque()
            for entry in entries:
                with self._changed:
                    self._seal(entry)
            with self._changed:
                segment = self._due()
            if segment is not None:
                self._spill(segment)

    def _due(self) -> _Segment | None:
        """Return the oldest full segment in memory if less than half of the memory would otherwise be free."""
        taken = self._in_memory - len(self._free) * self._segment_bytes
        if taken <= self._memory_bytes // 2:
            return None
        return self._oldest()

    def _spill(self, segment: _Segment) -> None:
        path = self._directory / f"segment-{segment.number}"
        with self._changed:
            for entry in segment.entries:
                self._seal(entry)
            memory = segment.memory
        if memory is None:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._leave_room(segment.used)
            with path.open("wb", buffering=0) as file:
                left = memory.data[: segment.used]
                while left:
                    left = left[file.write(left) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            with self._changed:
                self._give_up_oldest(f"{self._directory}: {error.strerror or error}")
            return
        with self._changed:
            if segment not in self._segments:  # dropped meanwhile
                path.unlink(missing_ok=True)
                return
            self._disk_fails = False
            segment.path = path
            self._recycle(segment)
            self._changed.notify_all()

    def _leave_room(self, nbytes: int) -> None:
        """Refuse to take the last of a disk: the run's logs and events are most likely there, too."""
        disk = os.statvfs(self._directory)
        spare = min(_SPARE_BYTES, disk.f_blocks * disk.f_frsize // 20)  # 0 where the size is not known
        if spare and disk.f_bavail * disk.f_frsize < nbytes + spare:
            last = f"the last {spare / (1 << 20):.1f} MB are left for logs"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {last}")
