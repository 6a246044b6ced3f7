"""One recorded message: a head with version, lengths and checksum, a JSON description, and the tensor's raw bytes.

Nothing in it is unpickled. The head stands at a multiple of 64 bytes and so does the payload, so that a tensor of any
type can be copied into its place and out of it without a copy in between.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

ALIGN = 64
_MAGIC = b"RGJL"
VERSION = 1
_HEAD = struct.Struct("<4sHHIQQ")  # magic, version, reserved, description's length, payload's length, checksum
HEAD_BYTES = _HEAD.size

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Channel(NamedTuple):
    """What tells messages apart whose order counts. ``peer`` is the receiver's rank in the world, or -1: all."""

    group: str
    op: str
    peer: int
    tag: int


class Damaged(RuntimeError):
    """A record is cut short or its checksum does not match; the message names it."""


@dataclass(frozen=True)
class Record:
    """A record that was read and found whole."""

    generation: int
    step: int
    channel: Channel
    sequence: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    payload: memoryview

    @property
    def name(self) -> str:
        """Where it belongs, for messages to people."""
        return f"message {self.sequence} of step {self.step} to rank {self.channel.peer} (tag {self.channel.tag})"

    def tensor(self) -> torch.Tensor:
        """Return the recorded values, in the record's own memory."""
        if not self.payload:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(self.payload, dtype=self.dtype).view(self.shape)

    def copy_to(self, tensor: torch.Tensor) -> None:
        """Write the recorded values into a tensor of the same size and type."""
        if tensor.dtype != self.dtype or tensor.numel() != torch.Size(self.shape).numel():
            raise ValueError(
                f"{self.name} is {self.dtype} of shape {self.shape}, but a tensor of {tensor.dtype} and shape "
                f"{tuple(tensor.shape)} is to receive it: does the script do the same in every run?"
            )
        if tensor.numel():
            with torch.no_grad():
                values = torch.frombuffer(self.payload, dtype=self.dtype)
                tensor.detach().copy_(values.view(tensor.shape))


def up(count: int) -> int:
    """Round up to the alignment."""
    return -(-count // ALIGN) * ALIGN


def describe(generation: int, step: int, channel: Channel, sequence: int, tensor: torch.Tensor) -> bytes:
    """Return the description of a message."""
    fields = [generation, step, list(channel), sequence, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
    return json.dumps(fields, separators=(",", ":")).encode()


def layout(description: bytes, payload_bytes: int) -> tuple[int, int]:
    """Return where the payload begins within a record, and the record's size."""
    start = up(HEAD_BYTES + len(description))
    return start, start + up(payload_bytes)


def seal(memory: memoryview, description: bytes, payload_bytes: int) -> None:
    """Write the head of a record whose description and payload are in place: from now on damage shows."""
    start, _ = layout(description, payload_bytes)
    digest = _checksum(description, memory[start : start + payload_bytes])
    memory[:HEAD_BYTES] = _HEAD.pack(_MAGIC, VERSION, 0, len(description), payload_bytes, digest)


def _checksum(description: bytes | memoryview, payload: memoryview) -> int:
    state = xxhash.xxh3_64()
    state.update(description)
    state.update(payload)
    return state.intdigest()


def read(memory: memoryview, where: str) -> Record:
    """Return the record in this memory; ``Damaged`` says what is wrong with it and ``where`` it is."""
    if len(memory) < HEAD_BYTES:
        raise Damaged(f"{where} is cut short: {len(memory)} bytes")
    magic, version, _, described, payload_bytes, digest = _HEAD.unpack_from(memory)
    if magic != _MAGIC or version != VERSION:
        raise Damaged(f"{where} is not a record of version {VERSION}")
    start = up(HEAD_BYTES + described)
    description = memory[HEAD_BYTES : HEAD_BYTES + described]
    payload = memory[start : start + payload_bytes]
    if len(payload) != payload_bytes:
        raise Damaged(f"{where} is cut short: {len(payload)} of {payload_bytes} bytes are there")
    if _checksum(description, payload) != digest:
        raise Damaged(f"{where} is damaged: its checksum does not match")
    fields: list[Any] = json.loads(bytes(description))
    generation, step, channel, sequence, dtype, shape = fields
    return Record(generation, step, Channel(*channel), sequence, _DTYPES[dtype], tuple(shape), payload)
