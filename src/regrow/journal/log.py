"""The journal of one rank: what it has sent, by step, in memory of a fixed size that spills to disk (``segments``).

The training thread copies a message once and goes on. A background thread adds checksums and writes the oldest segments
to disk before memory runs short. When the disk cannot keep up, the training thread waits, and that is reported; when it
cannot be written at all, the oldest steps are given up, and that is said: training never ends for the journal's sake.

Only the training thread begins steps; any thread may append, read, drop and ask.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from regrow.journal import record
from regrow.journal.record import Channel
from regrow.journal.segments import Entry, Pin, Segment, Segments

SEGMENT_BYTES = 8 << 20
DEFAULT_MEMORY_BYTES = 256 << 20
_WAIT_S = 60.0
_WORTH_SAYING_S = 0.005

Event = Callable[..., None]


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
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._on_event = on_event
        self._changed = threading.Condition()
        self._appending = threading.Lock()  # a collective's result is taken down by whichever thread learns of it
        self._segments = Segments(directory, memory_bytes, segment_bytes)
        self._unsealed: deque[Entry] = deque()
        self._thinned: set[int] = set()
        self._partial: set[int] = set()
        self._index: dict[int, dict[Channel, list[Entry]]] = {}
        self._next = 0
        """The first step that is not complete."""
        self._current = -1
        self._disk_fails = False
        self._needed = 0
        """Bytes of the message that waits for memory."""
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
        rows = self._index.get(step, {}).get(channel)
        if rows is None:
            with self._changed:  # another thread may be going through what this adds to
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
        entry = Entry(segment, base, length, description, payload_bytes, step, channel)
        with self._changed:
            self._segments.take_in(entry)
            rows.append(entry)
            self._unsealed.append(entry)  # sealed within a second, or when asked for: nobody is woken for each message
            self.bytes_appended += payload_bytes
            return Pin(place, entry) if pin and self._segments.pin(entry) else None

    def unpin(self, pins: Iterable[Pin]) -> None:
        """These messages were sent, or their connections are gone."""
        with self._changed:
            for pin in pins:
                self._segments.unpin(pin.entry)
            self._sweep()

    def _room(self, length: int) -> Segment:
        """Return a segment with room for this many bytes; waits while all memory is taken."""
        segment = self._segments.open_for(length)
        if segment is not None:
            return segment
        waited = 0.0
        with self._changed:
            self._segments.finish()
            self._needed = length
            self._changed.notify_all()  # it may be written to disk
            began = time.monotonic()
            while not self._segments.fits(length) and self._oldest() is not None:
                if not self._changed.wait(_WAIT_S):
                    self._give_up_oldest(f"the disk took no segment for {_WAIT_S:.0f} s")
                waited = time.monotonic() - began
            self._needed = 0
            segment = self._segments.add(length)
        if waited > _WORTH_SAYING_S:
            self.waited_s += waited
            self._on_event("journal_waited", seconds=waited, memory_bytes=self._memory_bytes)
        return segment

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
        return self._segments.in_memory

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
                self._segments.release(channels.pop(channel))
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
                self._segments.seal(entry)
            return [self._segments.read(entry) for entry in rows]

    def close(self) -> None:
        """End the background thread and remove what was spilled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(5.0)
        self._segments.clear()

    # with the lock held ----------------------------------------------------------------------------------------------

    def _forget(self, step: int) -> None:
        for rows in self._index.pop(step, {}).values():
            self._segments.release(rows)
        self._thinned.discard(step)
        self._partial.discard(step)
        self._sweep()

    def _sweep(self) -> None:
        self._segments.sweep()
        self._changed.notify_all()

    def _oldest(self) -> Segment | None:
        """Return the oldest segment that may be written, or, if the disk fails, given up.

        Not what the step in progress has sent if the disk fails: that can go nowhere, and waiting would not help.
        """
        return self._segments.oldest(unless=lambda segment: self._disk_fails and self._is_current(segment))

    def _is_current(self, segment: Segment) -> bool:
        return any(entry.wanted and entry.step >= self._current for entry in segment.entries)

    def _give_up_oldest(self, why: str) -> None:
        """Memory is full and the disk takes nothing: forget the oldest steps rather than stop the training."""
        self._disk_fails = True
        oldest = self._oldest()
        if oldest is None:
            return
        through = max((entry.step for entry in oldest.entries if entry.wanted), default=-1)
        for known in [known for known in self._index if known <= through]:
            self._forget(known)
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
                    self._segments.seal(entry)
            with self._changed:
                segment = self._due()
            if segment is not None:
                self._spill(segment)

    def _due(self) -> Segment | None:
        """Return the segment to be written next, if memory is scarce, or too little for a message that waits for it."""
        needed = self._needed > 0 and not self._segments.fits(self._needed)
        return self._oldest() if needed or self._segments.scarce else None

    def _spill(self, segment: Segment) -> None:
        with self._changed:
            for entry in segment.entries:
                self._segments.seal(entry)
        try:
            path = self._segments.write(segment)
        except OSError as error:
            with self._changed:
                self._give_up_oldest(f"{self._directory}: {error.strerror or error}")
            return
        if path is None:
            return
        with self._changed:
            if self._segments.settle(segment, path):
                self._disk_fails = False
                self._changed.notify_all()
