"""Frames between a worker and its host's agent, and between agents.

A frame is two 32-bit big-endian lengths, a JSON object, and raw bytes. Nothing that arrives is unpickled. The JSON
object has a ``type``; the bytes carry what JSON should not (tensors' memory, recorded results).
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from typing import Any, NamedTuple

_LENGTHS = struct.Struct("!II")
MAX_HEADER_BYTES = 16 << 20
MAX_BLOB_BYTES = 1 << 30
MAX_HELLO_BYTES = 1 << 12


class Frame(NamedTuple):
    """One message: ``head["type"]`` says which."""

    head: dict[str, Any]
    blob: bytes = b""


def encode(head: dict[str, Any], blob: bytes = b"") -> bytes:
    """Return the frame's bytes."""
    text = json.dumps(head, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(blob)) + text + blob


def _lengths(prefix: bytes, most_head: int = MAX_HEADER_BYTES, most_blob: int = MAX_BLOB_BYTES) -> tuple[int, int]:
    head_len, blob_len = _LENGTHS.unpack(prefix)
    if head_len > most_head or blob_len > most_blob:
        raise ConnectionError(f"frame of {head_len} + {blob_len} bytes is over the limit: not a regrow peer?")
    return head_len, blob_len


def _head(text: bytes) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter from thousands of brackets
        raise ConnectionError(f"frame without a JSON header: not a regrow peer? ({error})") from None
    if not isinstance(head, dict) or not isinstance(head.get("type"), str):
        raise ConnectionError("frame without a type: not a regrow peer?")
    return head


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Read one frame; ``asyncio.IncompleteReadError`` (an ``EOFError``) at the end of the stream."""
    head_len, blob_len = _lengths(await reader.readexactly(_LENGTHS.size))
    head = _head(await reader.readexactly(head_len))
    return Frame(head, await reader.readexactly(blob_len) if blob_len else b"")


async def read_hello(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read the first frame of a connection: small, since nobody knows yet who sends it."""
    head_len, _ = _lengths(await reader.readexactly(_LENGTHS.size), MAX_HELLO_BYTES, 0)
    return _head(await reader.readexactly(head_len))


def recv_exactly(sock: socket.socket, count: int) -> bytearray:
    """Read ``count`` bytes; ``EOFError`` if the peer closes first."""
    found = bytearray(count)
    left = memoryview(found)
    while left:
        got = sock.recv_into(left)
        if not got:
            raise EOFError("the peer closed the connection")
        left = left[got:]
    return found


def recv_frame(sock: socket.socket) -> Frame:
    """Read one frame from a blocking socket (its timeout applies to each read)."""
    head, blob = recv_parts(sock)
    return Frame(head, bytes(blob))


def recv_hello(sock: socket.socket, deadline: float) -> dict[str, Any]:
    """Read the first frame of a connection: small, and all of it in time, since nobody knows yet who sends it."""
    head_len, _ = _lengths(_recv_by(sock, _LENGTHS.size, deadline), MAX_HELLO_BYTES, 0)
    return _head(_recv_by(sock, head_len, deadline))


def _recv_by(sock: socket.socket, count: int, deadline: float) -> bytes:
    found = b""
    while len(found) < count:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no hello in time")
        sock.settimeout(left_s)  # of each read: one byte now and then would hold a connection for hours
        part = sock.recv(count - len(found))
        if not part:
            raise EOFError("the peer closed the connection")
        found += part
    return found


def recv_parts(sock: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Read one frame; its bytes are not copied once more, and are the caller's to write to."""
    head_len, blob_len = _lengths(bytes(recv_exactly(sock, _LENGTHS.size)))
    head = _head(bytes(recv_exactly(sock, head_len)))
    return head, recv_exactly(sock, blob_len)
