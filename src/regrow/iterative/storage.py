"""A running checkpoint on storage: one file in which every block has two places, written in turn.

A block's newer record is never overwritten: a write goes to the other place, and counts when all of it matches its
checksum. So whoever is killed in the middle of a write leaves the previous value readable, and the file stays as large
as it was, twice the state. The file itself is made under another name, flushed and renamed.

Places begin at multiples of a disk's sector, so that a sector that is torn when the power fails belongs to one record.
Should the index at the file's beginning be damaged, records are looked for at all of those.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import xxhash

from regrow.files import flush_directory
from regrow.iterative import record
from regrow.iterative.record import Damaged, Record

_SECTOR = 512
_MAGIC = b"RGRS"
_VERSION = 1
_HEAD = struct.Struct("<4sHHQQ")  # magic, version, reserved, the index's length, the index's checksum
_FILE = "running.blocks"
_LOCK = "running.lock"


class InUse(RuntimeError):
    """Another process writes to this directory."""


class _Place(NamedTuple):
    """Where a block's two records lie: one at ``offset``, one ``size`` bytes on."""

    offset: int
    size: int


@dataclass
class Found:
    """What storage holds: of each block the newest record that is whole."""

    records: dict[str, Record] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    """A sentence for each record that is damaged, and what is used in its place."""
    missing: list[str] = field(default_factory=list)
    """Blocks of which no record is whole."""


def exists(directory: Path) -> bool:
    """Whether there is a running checkpoint in this directory."""
    return (directory / _FILE).exists()


def read(directory: Path | str) -> Found:
    """Read a running checkpoint, also one that another process is writing or has left; nothing is changed."""
    path = Path(directory) / _FILE
    try:
        raw = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"there is no running checkpoint in {directory}: was this the directory it was given?"
        ) from None
    found = Found()
    places = _read_index(raw)
    if places is None:
        found.damaged.append(f"the index of {path.name} is damaged: records were looked for everywhere in it")
        for whole in _scan(raw):
            _keep_newer(found, whole)
        return found
    for name, place in places.items():
        _read_block(raw, name, place, found)
    return found


def glance(directory: Path | str) -> dict[str, Record]:
    """Return what there seems to be of each block, without its arrays: quick, whatever the size; empty if nothing.

    ``read`` may find a record damaged, and use an older one.
    """
    path = Path(directory) / _FILE
    found = Found()
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        head = os.pread(file, _HEAD.size, 0)
        length = _HEAD.unpack(head)[3] if len(head) == _HEAD.size else 0
        if length > os.fstat(file).st_size:
            length = 0
        places = _read_index(memoryview(head + os.pread(file, length, _HEAD.size)))
        for place in (places or {}).values():
            for start in (place.offset, place.offset + place.size):
                if (record_there := record.glance(file, start, place.size)) is not None:
                    _keep_newer(found, record_there)
    finally:
        os.close(file)
    return found.records if places is not None else read(directory).records


def _read_block(raw: memoryview, name: str, place: _Place, found: Found) -> None:
    troubles = []
    for number in range(2):
        start = place.offset + number * place.size
        memory = raw[start : start + place.size]
        if len(memory) == place.size and record.is_empty(memory):
            continue
        try:
            whole = record.unpack(memory, f"record {number} of block {name!r}")
        except Damaged as error:
            troubles.append(str(error))
            continue
        _keep_newer(found, whole)
    if name not in found.records:
        found.missing.append(name)
        found.damaged += [f"{trouble}: nothing else is left of this block" for trouble in troubles]
        return
    used = found.records[name].iteration
    found.damaged += [f"{trouble}: its value of iteration {used} is used" for trouble in troubles]


def _keep_newer(found: Found, whole: Record) -> None:
    known = found.records.get(whole.name)
    if known is None or known.sequence < whole.sequence:
        found.records[whole.name] = whole


def _read_index(raw: memoryview) -> dict[str, _Place] | None:
    if len(raw) < _HEAD.size:
        return None
    magic, version, _, length, digest = _HEAD.unpack_from(raw)
    text = raw[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or version != _VERSION or xxhash.xxh3_64_intdigest(text) != digest:
        return None
    return {name: _Place(offset, size) for name, offset, size in json.loads(bytes(text))}


def _scan(raw: memoryview) -> Iterator[Record]:
    for start in range(0, len(raw), _SECTOR):
        if record.begins(raw[start:]):
            try:
                yield record.unpack(raw[start:], f"the record at byte {start}")
            except Damaged:  # the caller has said that not all may be found
                continue


class Storage:
    """Writes the running checkpoint of one process. Not for several threads at once.

    The directory is locked while this lives. The lock is the kernel's, and dies with the process that has it.
    """

    def __init__(self, directory: Path, records: Sequence[Record]) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        self._file: int | None = None
        try:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise InUse(
                    f"another process writes its running checkpoint to {directory}: give each its own"
                ) from None
            self._sequence = 0
            self._make(records)
        except BaseException:
            self.close()
            raise

    def write(self, records: Sequence[Record]) -> int:
        """Write blocks and flush them to the disk; return how many bytes. No block may be among them twice.

        If it fails, all of these blocks keep the records they had.
        """
        assert self._file is not None
        packed = {each.name: record.pack(self._numbered(each)) for each in records}
        if any(_length(pieces) > self._places[name].size for name, pieces in packed.items()):
            return self._write_larger(records)
        for name, pieces in packed.items():
            place = self._places[name]
            _write_all(self._file, pieces, place.offset + (1 - self._newer[name]) * place.size)
        os.fdatasync(self._file)
        for name in packed:  # only now: of two records, one must be on the disk for certain
            self._newer[name] = 1 - self._newer[name]
        return sum(map(_length, packed.values()))

    def close(self) -> None:
        """Give up the file and the lock."""
        for descriptor in (self._file, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._file = self._lock = None

    def _numbered(self, each: Record) -> Record:
        self._sequence += 1
        return replace(each, sequence=self._sequence)

    def _make(self, records: Iterable[Record]) -> int:
        """Make the file anew with one record of each block."""
        packed = {each.name: record.pack(self._numbered(each)) for each in records}
        sizes = {name: _up(_length(pieces) + record.ROOM) for name, pieces in packed.items()}
        offset = _up(_HEAD.size + len(_index({name: _Place(1 << 62, 1 << 62) for name in packed})))
        places = {}
        for name, size in sizes.items():
            places[name] = _Place(offset, size)
            offset += 2 * size
        text = _index(places)
        head = _HEAD.pack(_MAGIC, _VERSION, 0, len(text), xxhash.xxh3_64_intdigest(text))
        path = self._directory / _FILE
        torn = path.with_suffix(".part")
        file = os.open(torn, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(file, offset)
            _write_all(file, [head, text], 0)
            for name, pieces in packed.items():
                _write_all(file, pieces, places[name].offset)
            os.fsync(file)
            torn.rename(path)
            flush_directory(self._directory)
        except BaseException:
            os.close(file)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file, self._places, self._newer = file, places, dict.fromkeys(places, 0)
        return offset

    def _write_larger(self, records: Sequence[Record]) -> int:
        """Write blocks of which one has outgrown its place: the newest of all go to a new file."""
        kept = read(self._directory).records
        return self._make({**kept, **{each.name: each for each in records}}.values())


def _index(places: dict[str, _Place]) -> bytes:
    return json.dumps([[name, *place] for name, place in places.items()], separators=(",", ":")).encode()


def _length(pieces: Sequence[bytes | memoryview]) -> int:
    return sum(map(len, pieces))


def _up(count: int) -> int:
    return -(-count // _SECTOR) * _SECTOR


def _write_all(file: int, pieces: Sequence[bytes | memoryview], offset: int) -> None:
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            written = os.pwrite(file, rest, offset)
            rest, offset = rest[written:], offset + written
