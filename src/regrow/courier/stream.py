"""The streams below the courier: one for each direction between two ranks, and for each generation.

A message is a head (the lengths of its name and of its payload), the name, and the payload. Whoever wants one reads the
stream until it comes, straight into the tensor; what comes before it and belongs to somebody else is put where that is
wanted, or put by. What is sent goes to the kernel as far as that takes it, and a thread writes the rest.

Nothing here knows of generations, or decides how long to wait: ``look``, which is asked now and then, does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

LOOK_EVERY_S = 0.25
_HEAD = struct.Struct("!HQ")  # the name's length, the payload's
_SILENT_S = 10


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory; writing to them writes the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(slots=True, eq=False)
class Wanted:
    """A message that is to be received, and where it goes."""

    peer: int
    name: bytes
    tensor: torch.Tensor
    done: bool = False


class Incoming:
    """What one rank sends to this one at one generation."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.connection: socket.socket | None = None
        self.reading = threading.Lock()
        self._head = bytearray(_HEAD.size)
        self._posted: dict[bytes, deque[Wanted]] = {}
        self._early: dict[bytes, deque[bytearray]] = {}
        self._broken = False
        """A message was left half read: the rest of it would be taken for the head of the next one."""

    def post(self, wanted: Wanted) -> None:
        """Somebody wants a message; it may have come already."""
        with self.reading:
            early = self._early.get(wanted.name)
            if early:
                payload = early.popleft()
                _fill(wanted, len(payload), lambda memory: _copy(memory, payload))
            else:
                self._posted.setdefault(wanted.name, deque()).append(wanted)

    def has(self, name: bytes) -> bool:
        """Whether a message that nobody has asked for is there."""
        return bool(self._early.get(name))

    def early(self, name: bytes) -> bytearray | None:
        """Return a message that was there before anyone asked for it."""
        early = self._early.get(name)
        return early.popleft() if early else None

    def stirs(self) -> bool:
        """Whether reading would find something at once: bytes, or the end."""
        if self.connection is None:
            return False
        ready = select.poll()  # not ``select``, which takes no descriptor above 1023
        ready.register(self.connection, select.POLLIN)
        return bool(ready.poll(0))

    def read(self, connection: socket.socket, look: Callable[[], None]) -> None:
        """Read one message, to where it is wanted, or put it by. ``look`` is asked, now and then, whether to go on.

        Before anything of a message has come, ``look`` may call it off, and it can be read later; in its middle, that
        ends the connection.
        """
        if self._broken:
            raise EOFError("a message was left half read")
        head = memoryview(self._head)
        count = _read_some(connection, head, look)
        try:
            _read(connection, head[count:], look)
            self._read_body(connection, look)
        except BaseException:
            self._broken = True
            _end(connection)
            raise

    def _read_body(self, connection: socket.socket, look: Callable[[], None]) -> None:
        name_bytes, size = _HEAD.unpack(self._head)
        name_ = bytearray(name_bytes)
        _read(connection, memoryview(name_), look)
        name = bytes(name_)
        wanted = self._posted.get(name)
        if wanted:
            _fill(wanted.popleft(), size, lambda memory: _read(connection, memory, look))
        else:
            payload = bytearray(size)
            _read(connection, memoryview(payload), look)
            self._early.setdefault(name, deque()).append(payload)

    def end(self) -> None:
        """Wake whoever reads."""
        _end(self.connection)

    def close(self) -> None:
        """Let go of it."""
        _end(self.connection)
        if self.connection is not None:
            self.connection.close()


class Outgoing:
    """What this rank sends to another at one generation."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.connection = connection
        self._peer = peer
        self._changed = threading.Condition()
        self._rest: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._ended = False

    def open(self, hello: bytes) -> None:
        """Say who sends here: the first that the other side reads."""
        tune(self.connection)
        self.connection.sendall(hello)

    def send(self, name: bytes, payload: memoryview, stays: bool) -> None:
        """Write what the kernel takes; the rest is left to a thread, from this memory if it stays, else from a copy."""
        head = _HEAD.pack(len(name), len(payload)) + name
        with self._changed:
            if self._error is not None:
                raise self._error
            sent = 0
            if not self._rest:
                with contextlib.suppress(BlockingIOError):
                    sent = self.connection.sendmsg([head, payload], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            left = len(head) + len(payload) - sent
            if not left:
                return
            if left > len(payload):
                self._rest.append(memoryview(head)[sent:])
            rest = payload[max(0, len(payload) - left) :]
            if rest:
                self._rest.append(rest if stays else memoryview(bytes(rest)))
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name=f"regrow-courier-to-{self._peer}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flushed(self, timeout_s: float) -> bool:
        """Whether nothing is left to write, after waiting for that."""
        if not self._rest:
            return True
        with self._changed:
            self._changed.wait_for(lambda: not self._rest or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            return not self._rest

    def _write(self) -> None:
        while True:
            with self._changed:
                while not self._rest and not self._ended:
                    self._changed.wait()
                if self._ended:
                    return
                part = self._rest[0]
            try:
                self.connection.sendall(part)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._rest.popleft()
                self._changed.notify_all()

    def end(self) -> None:
        """Wake whoever writes."""
        _end(self.connection)

    def close(self) -> None:
        """Let go of it, and of the thread."""
        _end(self.connection)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._thread is None or not self._thread.is_alive():
            self.connection.close()
        else:
            self._thread.join(1.0)  # its write has failed by now
            self.connection.close()


def _fill(wanted: Wanted, size: int, write: Callable[[memoryview], None]) -> None:
    tensor = wanted.tensor
    if size != tensor.numel() * tensor.element_size():
        raise ValueError(
            f"rank {wanted.peer} sent {size} bytes, but a tensor of {tuple(tensor.shape)} and {tensor.dtype} "
            f"({tensor.numel() * tensor.element_size()} bytes) is to receive them: the two sides must agree on shape "
            "and type"
        )
    if size:
        direct = tensor.is_contiguous() and tensor.device.type == "cpu"
        place = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
        write(memory_of(place))
        if not direct:
            with torch.no_grad():
                tensor.copy_(place)
    wanted.done = True


def _copy(memory: memoryview, payload: bytearray) -> None:
    memory[:] = payload


def _read(connection: socket.socket, memory: memoryview, look: Callable[[], None]) -> None:
    """Fill this memory."""
    while memory:
        memory = memory[_read_some(connection, memory, look) :]


def _read_some(connection: socket.socket, memory: memoryview, look: Callable[[], None]) -> int:
    """Wait for bytes; return how many came. The socket has a time-out in the kernel, after which ``look`` is asked."""
    while True:
        try:
            count = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            look()
            continue
        if not count:
            raise EOFError("the connection was closed")
        return count


def _end(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def tune(connection: socket.socket) -> None:
    """Let nothing be held back, nothing be waited for without a look, and a host that is gone be noticed."""
    seconds, micros = divmod(int(LOOK_EVERY_S * 1e6), 10**6)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, micros))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not TCP_USER_TIMEOUT: it would also end a connection to a rank that lives and does not read for a while.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_S)
