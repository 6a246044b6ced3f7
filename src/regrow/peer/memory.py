"""Snapshots in a host's memory: files in shared memory that outlive the worker, two buffers for each held state.

A buffer is a page with the head, then raw parts, each at its own offset, then the index. The head is wiped before
anything is written and comes back last, so that a snapshot is whole or not there. It says of which step and generation
the snapshot is, and where the generations up to it went on, so that it can be judged without being mapped. One process
writes a state's buffers at a time: the worker that holds the rank; its replacement reads them before it writes. Nothing
is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from regrow.ids import Step
from regrow.peer.room import Room, room

_MAGIC = b"RGSNAP02"
_FACTS = struct.Struct("<8sqqQQQH")  # magic, step, generation; where the index begins, its length, checksum; pairs
_PAIR = struct.Struct("<qq")  # a generation before it, and the step at which that went on
_MOST_PAIRS = 200
_CRC = struct.Struct("<I")
_PAGE = 4096
_ALIGN = 64
_BLOCK = 1 << 20
_SUB_BUFFER = 4 << 20
_POPULATED = 16 << 20
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE``, which Python 3.11 has no name for."""
_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)


class Damaged(RuntimeError):
    """A snapshot is not whole or its index does not match its checksum; the message names it."""


class NoRoom(ValueError):
    """A snapshot does not fit into the host's memory; the message has the numbers and the remedy."""


@dataclass(frozen=True)
class Layout:
    """Where each part of a snapshot lies in its buffer."""

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    end: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Layout:
        """Lay parts out one after the other."""
        offsets, at = [], _PAGE
        for size in sizes:
            offsets.append(at)
            at += -(-size // _ALIGN) * _ALIGN
        return cls(tuple(sizes), tuple(offsets), at)


@dataclass(frozen=True)
class Head:
    """What can be told of a snapshot at a glance."""

    step: Step
    generation: int
    """In which it was taken."""
    line: tuple[tuple[int, Step], ...]
    """The generations up to that one, and the step at which each went on."""
    index_at: int
    index_length: int
    index_checksum: int


@dataclass(frozen=True)
class Stored:
    """A part of a snapshot. It is read, not mapped: to map a large one takes longer than to copy it."""

    file: FileIO
    offset: int
    size: int

    def __len__(self) -> int:
        return self.size

    def into(self, memory: memoryview) -> int:
        """Copy it, and return its checksum; what is missing at the file's end is left as it was."""
        found = xxhash.xxh3_64()
        at = 0
        while at < self.size:
            block = memory[at : min(at + _BLOCK, self.size)]
            count = os.preadv(self.file.fileno(), [block], self.offset + at)
            if not count:
                break
            found.update(block[:count])  # it is still in the cache
            at += count
        return found.intdigest()

    def checksum(self, block: memoryview) -> int:
        """Return it without keeping what is read; ``block`` is memory to read to."""
        found = xxhash.xxh3_64()
        at = 0
        while at < self.size:
            count = os.preadv(self.file.fileno(), [block[: self.size - at]], self.offset + at)
            if not count:
                break
            found.update(block[:count])
            at += count
        return found.intdigest()

    def __bytes__(self) -> bytes:
        raw = bytearray(self.size)
        self.into(memoryview(raw))
        return bytes(raw)


class Buffer:
    """One snapshot's place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def step(self) -> Step | None:
        """Return the step of the snapshot that lies here whole, as far as its head says."""
        found = self.head()
        return None if found is None else found.step

    def head(self) -> Head | None:
        """Return what the head of the snapshot that lies here whole says."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_PAGE)
        except FileNotFoundError:
            return None
        if len(raw) < _FACTS.size:
            return None
        magic, step, generation, at, length, expected, pairs = _FACTS.unpack_from(raw)
        end = _FACTS.size + pairs * _PAIR.size
        if magic != _MAGIC or end + _CRC.size > len(raw) or zlib.crc32(raw[:end]) != _CRC.unpack_from(raw, end)[0]:
            return None
        line = tuple((early, Step(resumed)) for early, resumed in _PAIR.iter_unpack(raw[_FACTS.size : end]))
        return Head(Step(step), generation, line, at, length, expected)

    # writing ---------------------------------------------------------------------------------------------------------

    def open(self, layout: Layout) -> list[memoryview]:
        """Give up what lies here, and return the memory of each part of the next snapshot."""
        self.drop()
        self._reserve(layout.end)
        assert self._map is not None
        memory = memoryview(self._map)
        return [memory[at : at + size] for at, size in zip(layout.offsets, layout.sizes, strict=True)]

    def body(self, layout: Layout) -> memoryview:
        """Return the memory of all parts together, as it is sent to other hosts."""
        assert self._map is not None
        return memoryview(self._map)[_PAGE : layout.end]

    def seal(self, layout: Layout, index: dict[str, Any]) -> None:
        """All parts are written: from now on the snapshot is there."""
        text = json.dumps({**index, "offsets": layout.offsets}).encode()
        line = index.get("line", ())
        if len(line) > _MOST_PAIRS:
            raise ValueError(f"the head of a snapshot has room for {_MOST_PAIRS} generations, not for {len(line)}")
        checksum = xxhash.xxh3_64_intdigest(text)
        generation = index.get("generation", 0)
        facts = _FACTS.pack(_MAGIC, index["step"], generation, layout.end, len(text), checksum, len(line))
        facts += b"".join(_PAIR.pack(early, resumed) for early, resumed in line)
        facts += _CRC.pack(zlib.crc32(facts))
        with self._written(layout.end + len(text)) as descriptor:
            _put(descriptor, text, layout.end)
            _put(descriptor, facts[_FACTS.size :], _FACTS.size)
            _put(descriptor, facts[: _FACTS.size], 0)

    def drop(self) -> None:
        """Let nothing lie here; the memory is kept for the next one."""
        if self._path.exists():
            with self._written(_PAGE) as descriptor:
                _put(descriptor, bytes(_FACTS.size), 0)

    def take_in(self, layout: Layout, fill: Callable[[memoryview], None]) -> None:
        """Give up what lies here, and write all parts as they come, through a small buffer that is used over and over.

        Not to memory that is mapped: to allocate and map all of it beforehand takes long, and nothing would come in
        meanwhile.
        """
        self.drop()
        room = memoryview(bytearray(min(_SUB_BUFFER, layout.end - _PAGE)))
        with self._written(layout.end) as descriptor:
            for at in range(_PAGE, layout.end, _SUB_BUFFER):
                block = room[: min(_SUB_BUFFER, layout.end - at)]
                fill(block)
                _put(descriptor, block, at)

    @contextlib.contextmanager
    def _written(self, need: int) -> Iterator[int]:
        """Give a descriptor to write to, which takes as much memory as is written; ``NoRoom`` if there is none left."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            yield descriptor
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise NoRoom(_no_room(self._path.parent, need)) from None
        finally:
            os.close(descriptor)

    def _reserve(self, need: int) -> None:
        if self._map is not None and len(self._map) >= need:
            return
        need += need // 16  # optimizer state comes with the first update, an index may grow by a digit
        with self._written(need) as descriptor:
            there = os.fstat(descriptor).st_size
            if there < need:
                # not ftruncate alone: a page that cannot be had later would end this process with SIGBUS
                os.posix_fallocate(descriptor, there, need - there)
            # an older one goes with its views
            self._map = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED)
        _populate(self._map)

    # reading ---------------------------------------------------------------------------------------------------------

    def file(self) -> tuple[int, int]:
        """Return an open descriptor and where the parts begin, to be sent without being read; the caller closes it."""
        return os.open(self._path, os.O_RDONLY), _PAGE

    def read(self, name: str) -> tuple[dict[str, Any], list[Stored]]:
        """Return the index of the snapshot that lies here, which is checked, and its parts, which are not."""
        found = self.head()
        if found is None:
            raise Damaged(f"{name} is not whole: its head is missing or damaged")
        file = self._path.open("rb", buffering=0)
        text = bytes(Stored(file, found.index_at, found.index_length))
        if xxhash.xxh3_64_intdigest(text) != found.index_checksum:
            raise Damaged(f"{name} is damaged: its index does not match its checksum")
        index = json.loads(text)
        sizes = [size for size, _ in index["parts"]]
        return index, [Stored(file, at, size) for at, size in zip(index["offsets"], sizes, strict=True)]

    def remove(self) -> None:
        """Delete the file."""
        self._map = None
        self._path.unlink(missing_ok=True)


def _populate(mapped: mmap.mmap) -> None:
    """Have all pages there before they are written to: one by one they cost a fault each.

    Not by ``MAP_POPULATE``: no other thread runs meanwhile, for seconds with a large one, and the lease of a host whose
    agent stands still so long is over.
    """
    for at in range(0, len(mapped), _POPULATED):
        try:
            mapped.madvise(_POPULATE_WRITE, at, min(_POPULATED, len(mapped) - at))
        except OSError:  # a kernel before 5.14: then they come one by one
            return


def _put(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write all of it."""
    left = memoryview(data)
    while left:
        count = os.pwrite(descriptor, left, at)
        left, at = left[count:], at + count


def verify(index: dict[str, Any], parts: Sequence[memoryview], name: str) -> None:
    """Check every part against the index; ``Damaged`` says which does not match."""
    for number, ((size, expected), part) in enumerate(zip(index["parts"], parts, strict=True)):
        if len(part) != size or xxhash.xxh3_64_intdigest(part) != expected:
            raise Damaged(f"{name} is damaged: part {number} does not match its checksum")


def check(index: dict[str, Any], parts: Sequence[Stored], name: str) -> None:
    """Do the same with parts that lie in a file, through a small buffer."""
    block = memoryview(bytearray(_BLOCK))
    for number, ((size, expected), part) in enumerate(zip(index["parts"], parts, strict=True)):
        if part.size != size or part.checksum(block) != expected:
            raise Damaged(f"{name} is damaged: part {number} does not match its checksum")


def _no_room(directory: Path, need: int) -> str:
    free = 0
    with contextlib.suppress(OSError):
        stat = os.statvfs(directory)
        free = stat.f_bavail * stat.f_frsize
    return (
        f"a snapshot of this rank needs {need / 2**20:.0f} MB of shared memory, and there are {free / 2**20:.0f} MB "
        f"left in {directory.parent}: each rank keeps two. Give the host or container more of it (docker run "
        "--shm-size), or train with fewer ranks on a host"
    )


class Shelf:
    """The two buffers of one rank's state: the last whole snapshot, and the one in progress."""

    def __init__(self, path: Path) -> None:
        self._directory = path.parent
        self._buffers = [Buffer(path.with_name(f"{path.name}.{number}")) for number in range(2)]

    def whole(self) -> dict[Step, Buffer]:
        """Return the snapshots that are there, by step."""
        return {step: buffer for buffer in self._buffers if (step := buffer.step()) is not None}

    def next(self, step: Step) -> Buffer:
        """Return the buffer to write a step's snapshot to: that of the same step, an empty one, or the older one's.

        One that is written again must not cost the one before it, which may be all that others can go back to.
        """
        steps = [buffer.step() for buffer in self._buffers]
        if step in steps:
            return self._buffers[steps.index(step)]
        return self._buffers[min(range(2), key=lambda number: -1 if (s := steps[number]) is None else s)]

    def heads(self) -> list[Head]:
        """Return what can be told of the snapshots that are there."""
        return [head for buffer in self._buffers if (head := buffer.head()) is not None]

    def drop_unless(self, good: Callable[[Head], bool]) -> None:
        """Give up snapshots that are of no use any more."""
        for buffer in self._buffers:
            if (head := buffer.head()) is not None and not good(head):
                buffer.drop()

    def room(self) -> Room:
        """Return how much memory can still be had for snapshots here."""
        return room(self._directory)

    def remove(self) -> None:
        """Delete what is there."""
        for buffer in self._buffers:
            buffer.remove()
