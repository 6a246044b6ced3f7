"""One saved block as bytes: a head with version, lengths and checksum, a description in JSON, and the raw arrays.

Nothing in it is unpickled.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from regrow.iterative import arrays
from regrow.iterative.arrays import Array

_MAGIC = b"RGRB"
_VERSION = 2
_HEAD = struct.Struct("<4sHHQQQ")  # magic, version, reserved, the description's length, the arrays', checksum
ROOM = 64
"""So many bytes more a record may need later, for longer numbers in its description."""


class Damaged(RuntimeError):
    """A record is cut short, or does not match its checksum; the message names it."""


@dataclass(frozen=True)
class Record:
    """A block as it was saved."""

    name: str
    iteration: int
    """After which iteration it had this value."""
    sequence: int
    """Higher than that of any record written before: iterations may be counted back, this is not."""
    speed: float
    """How far it moved in one iteration, when it was last looked at."""
    value: tuple[Array, ...]
    note: str = ""
    """What its owner said of it."""


def pack(record: Record) -> list[bytes | memoryview]:
    """Return a record's bytes, in pieces."""
    parts = [arrays.bytes_of(array) for array in record.value]
    described = [[*arrays.describe(array), len(part)] for array, part in zip(record.value, parts, strict=True)]
    fields = [record.name, record.iteration, record.sequence, record.speed, described, record.note]
    text = json.dumps(fields, separators=(",", ":")).encode()
    head = _HEAD.pack(_MAGIC, _VERSION, 0, len(text), sum(map(len, parts)), _checksum(text, parts))
    return [head, text, *parts]


def is_empty(memory: memoryview) -> bool:
    """Whether nothing was ever written here."""
    return not any(memory[: _HEAD.size])


def begins(memory: memoryview) -> bool:
    """Whether this looks like the beginning of a record."""
    return bytes(memory[: len(_MAGIC)]) == _MAGIC


def unpack(memory: memoryview, where: str) -> Record:
    """Return the record that begins here; ``Damaged`` says what is wrong with it and ``where`` it is."""
    if len(memory) < _HEAD.size:
        raise Damaged(f"{where} is cut short: {len(memory)} bytes")
    magic, version, _, text_bytes, value_bytes, digest = _HEAD.unpack_from(memory)
    if magic != _MAGIC or version != _VERSION:
        raise Damaged(f"{where} is not a record of version {_VERSION}")
    end = _HEAD.size + text_bytes + value_bytes
    if end > len(memory):
        raise Damaged(f"{where} is damaged: of its {end} bytes {len(memory)} can be there")
    text = memory[_HEAD.size : _HEAD.size + text_bytes]
    body = memory[_HEAD.size + text_bytes : end]
    if _checksum(text, [body]) != digest:
        raise Damaged(f"{where} does not match its checksum")
    name, iteration, sequence, speed, described, note = json.loads(bytes(text))
    value, at = [], 0
    for *description, size in described:
        value.append(arrays.from_bytes(description, bytearray(body[at : at + size])))
        at += size
    return Record(name, iteration, sequence, speed, tuple(value), note)


def glance(file: int, offset: int, size: int) -> Record | None:
    """Return what the record at a place of a file says of itself, without its arrays; ``None`` if there is none.

    Nothing is compared with its checksum, which is over the arrays, too.
    """
    head = os.pread(file, _HEAD.size, offset)
    if len(head) < _HEAD.size:
        return None
    magic, version, _, text_bytes, _, _ = _HEAD.unpack(head)
    if magic != _MAGIC or version != _VERSION or _HEAD.size + text_bytes > size:
        return None
    try:
        name, iteration, sequence, speed, _, note = json.loads(os.pread(file, text_bytes, offset + _HEAD.size))
    except ValueError:
        return None
    return Record(name, iteration, sequence, speed, (), note)


def _checksum(text: bytes | memoryview, parts: Sequence[memoryview]) -> int:
    state = xxhash.xxh3_64()
    state.update(text)
    for part in parts:
        state.update(part)
    return state.intdigest()
