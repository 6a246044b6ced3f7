"""What a set-up's operations gave the first time, and giving it again to a replacement that has no peers yet.

A record is a magic, a version, a checksum, a JSON index and raw bytes; nothing in it is unpickled. Per group and in
order it holds each operation's name, the shapes and types of its outputs, and the outputs. A large broadcast of module
state has no outputs in it (*identity*: the tensor is left as it is), since a recovery overwrites that state anyway.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePath
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from regrow.errors import SetupDiverged
from regrow.group.work import RecordedWork, ReplayedWork

SMALL_BYTES = 64 << 10
RECORD_LIMIT = 256 << 20
_MAGIC = b"RGRC"
_VERSION = 1
_HEAD = struct.Struct("!4sHQI")  # magic, version, length of the index, crc of all that follows

_STATE_SYNC = frozenset({"_sync_module_states", "_broadcast_coalesced", "_sync_params_and_buffers"})


def outputs_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes: in every signature of torch the first argument, flattened."""
    if name in ("send", "barrier", "monitored_barrier"):
        return []
    first = args[0] if args else next((value for value in kwargs.values() if _tensors(value)), None)
    return _tensors(first)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def describe(tensors: list[torch.Tensor]) -> list[list[Any]]:
    """Return dtype and shape of each tensor, as JSON has them."""
    return [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _write_into(tensor: torch.Tensor, data: bytes) -> None:
    if tensor.numel():
        flat = torch.frombuffer(bytearray(data), dtype=tensor.dtype)
        with torch.no_grad():
            tensor.detach().copy_(flat.reshape(tensor.shape))


def _syncs_module_state() -> bool:
    """Whether the calling code is torch's own synchronisation of module state. Walks the frames: in a set-up only."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _STATE_SYNC:
            return True
        parts = PurePath(code.co_filename).parts
        if parts[-3:] == ("nn", "parallel", "distributed.py") and code.co_name == "__init__":
            return True
        if "torch" in parts and "fsdp" in parts:
            return True
        frame = frame.f_back
    return False


@dataclass
class Entry:
    """One operation of one group. ``data`` is ``None`` until it is complete, and for ever if it is an identity."""

    op: str
    tensors: list[list[Any]]
    identity: bool = False
    data: list[bytes] | None = None
    source_rank: int = -1
    refused: str | None = None  # by the call itself
    failed: str | None = None  # in the wait for it
    work: RecordedWork | None = field(default=None, repr=False)


class Recorder:
    """Takes down what live operations give. Used by one set-up; several threads may issue operations."""

    def __init__(self, limit: int = RECORD_LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._groups: dict[str, list[Entry]] = {}

    def take(self, group: str, name: str, outputs: list[torch.Tensor], live: dist.Work | None) -> dist.Work | None:
        """Enter an operation that has just been issued; return the handle that its caller gets."""
        if name == "send":  # a replacement's sends go nowhere
            with self._lock:
                self._groups.setdefault(group, []).append(Entry(name, [], data=[]))
            return live
        size = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        entry = Entry(name, describe(outputs))
        entry.identity = size > SMALL_BYTES and name == "broadcast" and _syncs_module_state()
        with self._lock:
            self._groups.setdefault(group, []).append(entry)
        if entry.identity or live is None:
            entry.data = []
            return live

        def capture(source_rank: int, failure: str | None) -> None:
            entry.data = [] if failure is not None else [_bytes_of(tensor) for tensor in outputs]
            entry.source_rank, entry.failed = source_rank, failure
            entry.work = None

        entry.work = RecordedWork(live, capture)
        return entry.work

    def refuse(self, group: str, name: str, outputs: list[torch.Tensor], reason: Exception) -> None:
        """Enter an operation that was not accepted: its caller may live with that, and must meet it again."""
        entry = Entry(name, [] if name == "send" else describe(outputs), data=[], refused=str(reason))
        with self._lock:
            self._groups.setdefault(group, []).append(entry)

    def bytes(self) -> bytes:
        """Return the record; waits for operations whose caller has not waited yet."""
        index: dict[str, list[dict[str, Any]]] = {}
        parts: list[bytes] = []
        total = 0
        for group, entries in self._groups.items():
            rows = index.setdefault(group, [])
            for entry in entries:
                if entry.work is not None:
                    entry.work.wait()
                row: dict[str, Any] = {"op": entry.op, "tensors": entry.tensors}
                if entry.identity:
                    row["identity"] = True
                else:
                    row["sizes"] = [len(part) for part in entry.data or []]
                    parts += entry.data or []
                    total += sum(row["sizes"])
                if entry.refused is not None:
                    row["refused"] = entry.refused
                if entry.failed is not None:
                    row["failed"] = entry.failed
                if entry.source_rank >= 0:
                    row["source_rank"] = entry.source_rank
                rows.append(row)
        if total > self._limit:
            raise ValueError(
                f"the set-up's collectives gave {total >> 20} MB, over the limit of {self._limit >> 20} MB that a "
                "replacement may be given again: move large collectives (other than torch's broadcast of module state) "
                "out of the set-up, behind the first step, or load that data from disk on every rank"
            )
        return encode(index, b"".join(parts))


def encode(index: dict[str, list[dict[str, Any]]], payload: bytes) -> bytes:
    """Return the record's bytes."""
    text = json.dumps(index, separators=(",", ":")).encode()
    crc = zlib.crc32(payload, zlib.crc32(text))
    return _HEAD.pack(_MAGIC, _VERSION, len(text), crc) + text + payload


def decode(record: bytes) -> tuple[dict[str, list[dict[str, Any]]], memoryview]:
    """Return index and payload; ``ValueError`` for anything but an undamaged record of this version."""
    if len(record) < _HEAD.size:
        raise ValueError(f"a record of {len(record)} bytes is cut short")
    magic, version, text_len, crc = _HEAD.unpack_from(record)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"not a set-up record of version {_VERSION} (magic {magic!r}, version {version})")
    body = memoryview(record)[_HEAD.size :]
    if text_len > len(body) or zlib.crc32(body) != crc:
        raise ValueError("the set-up record is damaged: its checksum does not match")
    index: dict[str, list[dict[str, Any]]] = json.loads(bytes(body[:text_len]))
    return index, body[text_len:]


class Replayer:
    """Answers operations from a record, per group in the order of the first time."""

    def __init__(self, record: bytes | None) -> None:
        index, payload = decode(record) if record is not None else ({}, memoryview(b""))
        self._lock = threading.Lock()
        self._next: dict[str, int] = {}
        self._groups: dict[str, list[Entry]] = {}
        at = 0
        for group, rows in index.items():
            entries = self._groups[group] = []
            for row in rows:
                data: list[bytes] = []
                for size in row.get("sizes", []):
                    data.append(bytes(payload[at : at + size]))
                    at += size
                entry = Entry(row["op"], row["tensors"], bool(row.get("identity")), data)
                entry.source_rank = int(row.get("source_rank", -1))
                entry.refused, entry.failed = row.get("refused"), row.get("failed")
                entries.append(entry)

    def answer(self, group: str, name: str, outputs: list[torch.Tensor]) -> dist.Work | None:
        """Give an operation its recorded outputs; ``SetupDiverged`` if it is not the one of the first time."""
        with self._lock:
            entries = self._groups.get(group, [])
            at = self._next.get(group, 0)
            came = f"{name} of {describe(outputs)}" if outputs else name
            where = f"group {group!r}, operation {at + 1}"
            if at >= len(entries):
                raise SetupDiverged(
                    f"{where}: {came} came, but the first set-up had only {len(entries)} operations here"
                )
            entry = entries[at]
            if entry.op != name or (name != "send" and entry.tensors != describe(outputs)):
                expected = f"{entry.op} of {entry.tensors}" if entry.tensors else entry.op
                raise SetupDiverged(f"{where}: the first set-up had {expected}, but {came} came")
            self._next[group] = at + 1
        if entry.refused is not None:
            raise RuntimeError(entry.refused)
        if not entry.identity and entry.failed is None:
            for tensor, data in zip(outputs, entry.data or [], strict=True):
                _write_into(tensor, data)
        return None if name == "monitored_barrier" else ReplayedWork(outputs, entry.source_rank, entry.failed)

    def left(self) -> dict[str, int]:
        """Return how many operations of each group were not asked for."""
        counts = {group: len(entries) - self._next.get(group, 0) for group, entries in self._groups.items()}
        return {group: count for group, count in counts.items() if count}


class Answerer:
    """Answers operations by a function of their outputs."""

    def __init__(self, answer: Callable[[str, list[torch.Tensor]], None]) -> None:
        self._answer = answer

    def answer(self, group: str, name: str, outputs: list[torch.Tensor]) -> dist.Work:
        """Fill the outputs."""
        self._answer(name, outputs)
        return ReplayedWork(outputs)
