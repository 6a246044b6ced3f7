"""Stream tensors between ranks in chunks, from several sources at once, with no pickle and no second full copy.

Both sides derive the same chunks from the same descriptions, so nothing but the tensors' bytes travels. Large tensors
are sent and received in place, slice by slice; small ones are packed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

CHUNK_BYTES = 8 << 20
PACK_BYTES = 1 << 18
"""Tensors below this size travel packed together."""


class Channel(Protocol):
    """Point-to-point transport: what a healing group offers."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        """Start to send; returns a work to wait for."""
        ...

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        """Start to receive in place; returns a work to wait for."""
        ...


@dataclass(frozen=True)
class Piece:
    """Bytes ``start`` to ``stop`` of tensor ``index``."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """What one message carries: a slice of a large tensor, or several small tensors packed."""

    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Size of the message."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def cut(sizes: Sequence[int]) -> list[Chunk]:
    """Cut tensors of these sizes in bytes into chunks. Pure; the same on both sides."""
    chunks: list[Chunk] = []
    packed: list[Piece] = []
    room = PACK_BYTES
    for index, size in enumerate(sizes):
        if size == 0:
            continue
        if size < PACK_BYTES:
            if size > room:
                chunks.append(Chunk(tuple(packed)))
                packed, room = [], PACK_BYTES
            packed.append(Piece(index, 0, size))
            room -= size
            continue
        for start in range(0, size, CHUNK_BYTES):
            chunks.append(Chunk((Piece(index, start, min(start + CHUNK_BYTES, size)),)))
    if packed:
        chunks.append(Chunk(tuple(packed)))
    return chunks


def share(chunks: Sequence[Chunk], sources: int) -> list[int]:
    """Say which source sends each chunk, so that all send about the same. Pure."""
    load = [0] * sources
    owners = []
    for chunk in chunks:
        owner = load.index(min(load))
        load[owner] += chunk.nbytes
        owners.append(owner)
    return owners


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a flat uint8 view."""
    return tensor.detach().reshape(-1).view(torch.uint8)


@dataclass
class _Pending:
    work: Any
    buffer: torch.Tensor
    chunk: Chunk | None


def send_share(
    channel: Channel, tensors: Sequence[torch.Tensor], *, dst: int, place: int, sources: int, tag: int
) -> list[_Pending]:
    """Start to send this source's share (``place`` of ``sources``) of the tensors to ``dst``."""
    flat = [_bytes_of(tensor if tensor.is_contiguous() else tensor.contiguous()) for tensor in tensors]
    chunks = cut([view.numel() for view in flat])
    pending = []
    for number, (chunk, owner) in enumerate(zip(chunks, share(chunks, sources), strict=True)):
        if owner != place:
            continue
        parts = [flat[piece.index][piece.start : piece.stop] for piece in chunk.pieces]
        buffer = parts[0] if len(parts) == 1 else torch.cat(parts)
        pending.append(_Pending(channel.send([buffer], dst, tag + number), buffer, None))
    return pending


def receive(channel: Channel, tensors: Sequence[torch.Tensor], *, sources: Sequence[int], tag: int) -> list[_Pending]:
    """Start to receive all tensors, contiguous and of the sender's description, from the sources' shares."""
    flat = [_bytes_of(tensor) for tensor in tensors]
    chunks = cut([view.numel() for view in flat])
    pending = []
    for number, (chunk, owner) in enumerate(zip(chunks, share(chunks, len(sources)), strict=True)):
        if len(chunk.pieces) == 1:
            piece = chunk.pieces[0]
            buffer, unpack = flat[piece.index][piece.start : piece.stop], None
        else:
            buffer, unpack = (
                torch.empty(chunk.nbytes, dtype=torch.uint8, device=flat[chunk.pieces[0].index].device),
                chunk,
            )
        pending.append(_Pending(channel.recv([buffer], sources[owner], tag + number), buffer, unpack))
    return pending


def finish(pending: Sequence[_Pending], tensors: Sequence[torch.Tensor] = ()) -> int:
    """Wait until all is sent or received, unpack into ``tensors``, and return the bytes moved."""
    moved = 0
    flat: dict[int, torch.Tensor] = {}
    for item in pending:
        item.work.wait()
        moved += item.buffer.numel()
        if item.chunk is None:
            continue
        offset = 0
        for piece in item.chunk.pieces:
            size = piece.stop - piece.start
            if piece.index not in flat:
                flat[piece.index] = _bytes_of(tensors[piece.index])
            flat[piece.index][piece.start : piece.stop].copy_(item.buffer[offset : offset + size])
            offset += size
    return moved


HEAD_TAGS = 2
"""Tags that ``send_bytes`` uses: the lengths, then the bytes."""


def send_bytes(channel: Channel, data: bytes, tail: int, dst: int, tag: int) -> list[_Pending]:
    """Start to send bytes whose last ``tail`` are told apart from the rest."""
    lengths = torch.tensor([len(data) - tail, tail], dtype=torch.int64)
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [
        _Pending(channel.send([lengths], dst, tag), lengths, None),
        _Pending(channel.send([body], dst, tag + 1), body, None),
    ]


def receive_bytes(channel: Channel, src: int, tag: int) -> tuple[bytes, bytes]:
    """Receive what ``send_bytes`` sends: the head and the tail."""
    lengths = torch.zeros(2, dtype=torch.int64)
    channel.recv([lengths], src, tag).wait()
    head, tail = lengths.tolist()
    body = torch.empty(head + tail, dtype=torch.uint8)
    channel.recv([body], src, tag + 1).wait()
    raw = body.numpy().tobytes()
    return raw[:head], raw[head:]
