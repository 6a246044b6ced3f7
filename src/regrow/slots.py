"""Memory that outlives the worker: the small state of one rank, in files that the agent owns.

Only the worker that holds the rank writes them, and only after it holds state; its replacement reads them before it
writes the first time. A kill in the middle of a write leaves a slot whose checksum is wrong, and its neighbour whole.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from regrow.ids import Step

_FACTS = struct.Struct("<8sqqI")  # magic, step, sequence, length of the payload
_HEADER = struct.Struct("<8sqqII")  # the same, and a crc32 over them and the payload
_MAGIC = b"regrow01"


@dataclass(frozen=True)
class Left:
    """What a predecessor left: its own small state at the start of some steps, and the newest of all."""

    starts: dict[Step, bytes]
    live: tuple[Step, bytes] | None


class _Slot:
    """One file, mapped into memory and grown when needed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def write(self, step: int, sequence: int, payload: bytes) -> None:
        need = _HEADER.size + len(payload)
        if self._map is None or len(self._map) < need:
            self._grow(need)
        assert self._map is not None
        # The header goes first to zero and last to its value: a kill in between leaves no valid record.
        self._map[: _HEADER.size] = bytes(_HEADER.size)
        self._map[_HEADER.size : need] = payload
        facts = _FACTS.pack(_MAGIC, step, sequence, len(payload))
        self._map[: _HEADER.size] = facts + zlib.crc32(payload, zlib.crc32(facts)).to_bytes(4, "little")

    def _grow(self, need: int) -> None:
        if self._map is not None:
            self._map.close()
        size = -(-need * 2 // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, max(size, os.fstat(descriptor).st_size))
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)

    def read(self) -> tuple[int, int, bytes] | None:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if len(raw) < _HEADER.size:
            return None
        magic, step, sequence, length, crc = _HEADER.unpack(raw[: _HEADER.size])
        payload = raw[_HEADER.size : _HEADER.size + length]
        expected = zlib.crc32(payload, zlib.crc32(raw[: _FACTS.size]))
        if magic != _MAGIC or len(payload) != length or expected != crc:
            return None
        return step, sequence, payload

    def wipe(self) -> None:
        """Let no record be here; the file stays, since it may be mapped."""
        with self._path.open("r+b") as file:
            file.write(bytes(_HEADER.size))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class Slots:
    """Two slots for the starts of the last two steps, two for what is published within a step."""

    def __init__(self, path: Path) -> None:
        self._starts = [_Slot(path.with_name(f"{path.name}.start{i}")) for i in range(2)]
        self._lives = [_Slot(path.with_name(f"{path.name}.live{i}")) for i in range(2)]
        self._sequence = 0

    def start(self, step: Step, payload: bytes) -> None:
        """Keep the state at the start of ``step``; the one of the step before stays."""
        self._sequence += 1
        self._starts[step % 2].write(step, self._sequence, payload)

    def live(self, step: Step, payload: bytes) -> None:
        """Keep the state within ``step``, just before a collective is issued."""
        self._sequence += 1
        self._lives[self._sequence % 2].write(step, self._sequence, payload)

    def last_step(self) -> Step | None:
        """Return the newest step that was begun, for the agent to tell where a worker died."""
        steps = [Step(found[0]) for slot in self._starts if (found := slot.read())]
        return max(steps, default=None)

    def drop_after(self, step: Step) -> None:
        """Give up what was kept at the start of later steps: they are done again."""
        for slot in self._starts:
            if (found := slot.read()) is not None and found[0] > step:
                slot.wipe()

    def remove(self) -> None:
        """Delete what is there: the run starts again from its beginning."""
        for slot in (*self._starts, *self._lives):
            slot.remove()

    def left(self) -> Left:
        """Read what is there, whoever wrote it; damaged records are passed over."""
        starts = {Step(found[0]): found[2] for slot in self._starts if (found := slot.read())}
        lives = sorted((found for slot in self._lives if (found := slot.read())), key=lambda found: found[1])
        self._sequence = max([self._sequence, *(found[1] for found in lives)])
        live = (Step(lives[-1][0]), lives[-1][2]) if lives else None
        begun = max(starts, default=None)
        if begun is not None and (live is None or live[0] < begun):
            live = (begun, starts[begun])  # nothing was published in that step, so nothing had changed since its start
        return Left(starts, live)

    def close(self) -> None:
        """Unmap; the files stay."""
        for slot in (*self._starts, *self._lives):
            slot.close()
