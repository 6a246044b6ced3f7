"""Messages from rank to rank over sockets of their own: what the stages of a pipeline say to each other.

gloo reads in a thread of its own, forgets a message that is half read when its connection breaks, and cannot be called
off; so each wait for one had to be made in yet another thread. Here the thread that wants a message reads it, straight
into the tensor, and whoever must wake it shuts the socket. A message is sent at once as far as the kernel takes it; a
thread writes the rest, so that sending never blocks, in whichever order both sides send and receive.

One connection for each direction, made by the sender; a hello says who it is, and of which generation. Nothing of an
older generation is ever read. Messages of one name arrive in order; those of different names may be received in any.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from regrow import wire
from regrow.errors import PeerLost

_HEAD = struct.Struct("!HQ")  # the name's length, the payload's
_LOOK_EVERY_S = 0.25
_HELLO_S = 10.0
_SILENT_S = 10
_NO_TIMEOUT = timedelta(0)

Address = tuple[str, int]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory; writing to them writes the tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class Courier:
    """All messages of one rank. Used by the thread that trains and by backward's; any thread may ``sever``."""

    def __init__(self, rank: int, host: str, token: str) -> None:
        self._rank = rank
        self._token = token
        self._changed = threading.Condition()
        self._generation = 0
        self._fenced = 0
        """Generations below this one are over."""
        self._addresses: Sequence[Address] = ()
        self._connecting = threading.Lock()
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[tuple[int, int], _Incoming] = {}
        self._closed = False
        self.waiting = False
        """Whether a message is waited for right now."""
        self.waited_s = 0.0
        """How long messages were waited for in all, reading them included."""
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: Address = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="regrow-courier", daemon=True).start()
        _let_go_in_forks(self)

    # generations -----------------------------------------------------------------------------------------------------

    def resume(self, generation: int, addresses: Sequence[Address]) -> None:
        """A generation begins: what is left of older ones is dropped."""
        with self._changed:
            self._generation = generation
            self._fenced = max(self._fenced, generation)
            self._addresses = addresses
            old: list[_Outgoing | _Incoming] = [*self._outgoing.values()]
            self._outgoing = {}
            for key in [key for key in self._incoming if key[0] < generation]:
                old.append(self._incoming.pop(key))
        for connection in old:
            connection.close()

    def sever(self, *, below: int) -> None:
        """Generations before this one are over: wake whoever waits for a message of theirs. Quick."""
        with self._changed:
            if below <= self._fenced:
                return
            self._fenced = below
            open_: list[_Outgoing | _Incoming] = [*self._outgoing.values()] if self._generation < below else []
            open_ += [connection for key, connection in self._incoming.items() if key[0] < below]
            self._changed.notify_all()
        for connection in open_:
            connection.end()

    def close(self) -> None:
        """Drop all connections and listen no more."""
        self._closed = True
        self.sever(below=1 << 62)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread that accepts
        self._listener.close()
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()

    def _over(self) -> PeerLost | None:
        if self._generation >= self._fenced:
            return None
        return PeerLost(
            f"generation {self._generation} ended while a message was waited for", generation=self._generation
        )

    # sending ---------------------------------------------------------------------------------------------------------

    def send(self, peer: int, name: str, payload: memoryview, *, stays: bool) -> None:
        """Send a message. ``stays``: its memory will not change before ``flush`` returns or the generation ends."""
        if (over := self._over()) is not None:
            raise over
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            with self._connecting:  # one connection, whichever threads come first
                outgoing = self._outgoing.get(peer) or self._connect(peer)
        try:
            outgoing.send(name.encode(), payload, stays)
        except OSError as error:
            raise self._lost(peer, error) from None

    def flush(self) -> None:
        """Wait until the kernel has taken all that was sent."""
        began_s = time.monotonic()
        for peer, outgoing in list(self._outgoing.items()):
            self.waiting = True
            try:
                while not outgoing.flushed(_LOOK_EVERY_S):
                    if (over := self._over()) is not None:
                        raise over
            except OSError as error:
                raise self._lost(peer, error) from None
            finally:
                self.waiting = False
        self.waited_s += time.monotonic() - began_s

    def _connect(self, peer: int) -> _Outgoing:
        generation = self._generation
        try:
            connection = socket.create_connection(self._addresses[peer], _HELLO_S)
            connection.settimeout(None)
            _tune(connection)
            hello = {"type": "hello", "token": self._token, "generation": generation, "rank": self._rank}
            connection.sendall(wire.encode(hello))
        except OSError as error:
            raise self._lost(peer, error) from None
        outgoing = _Outgoing(connection, peer)
        with self._changed:
            if self._fenced <= generation:
                self._outgoing[peer] = outgoing
                return outgoing
        outgoing.close()
        raise PeerLost(f"generation {generation} ended", generation=generation)

    def _lost(self, peer: int, error: Exception) -> PeerLost:
        return PeerLost(f"rank {peer} cannot be reached: {error}", generation=self._generation)

    # receiving -------------------------------------------------------------------------------------------------------

    def receive(self, peer: int, name: str, tensor: torch.Tensor, timeout: timedelta) -> Receipt:
        """Receive a message into a tensor, when its receipt is waited for."""
        incoming = self._from(peer)
        receipt = Receipt(self, incoming, peer, name, tensor, timeout)
        incoming.post(receipt)
        return receipt

    def take(self, peer: int, name: str, timeout: timedelta) -> bytearray:
        """Wait for a message of any size, and return it."""
        incoming = self._from(peer)
        wanted = name.encode()
        deadline = time.monotonic() + timeout.total_seconds()
        with self._listening(peer), incoming.reading:
            while (found := incoming.early(wanted)) is None:
                self._read(incoming, peer, deadline)
        return found

    def has(self, peer: int, name: str) -> bool:
        """Whether a message of any size is there, without waiting for it."""
        incoming = self._from(peer)
        with incoming.reading, self._listening(peer):
            while not incoming.has(name.encode()):
                connection = incoming.connection
                if connection is None or not select.select([connection], [], [], 0)[0]:
                    return False
                self._read(incoming, peer, time.monotonic() + _HELLO_S)
        return True

    def _from(self, peer: int) -> _Incoming:
        key = (self._generation, peer)
        with self._changed:
            incoming = self._incoming.get(key)
            if incoming is None:
                incoming = self._incoming[key] = _Incoming()
            return incoming

    def wait(self, receipt: Receipt, incoming: _Incoming, timeout: timedelta) -> None:
        """Read from a rank until a message is there."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._listening(receipt.peer), incoming.reading:
            while not receipt.done:
                self._read(incoming, receipt.peer, deadline)

    @contextlib.contextmanager
    def _listening(self, peer: int) -> Iterator[None]:
        self.waiting = True
        began_s = time.monotonic()
        try:
            yield
        except (OSError, EOFError) as error:
            raise self._over() or self._lost(peer, error) from None
        finally:
            self.waiting = False
            self.waited_s += time.monotonic() - began_s

    def _read(self, incoming: _Incoming, peer: int, deadline: float) -> None:
        connection = self._connected(incoming, peer, deadline)
        incoming.read(connection, lambda: self._look(peer, deadline))

    def _connected(self, incoming: _Incoming, peer: int, deadline: float) -> socket.socket:
        if incoming.connection is None:
            with self._changed:
                while incoming.connection is None:
                    self._look(peer, deadline)
                    self._changed.wait(_LOOK_EVERY_S)
        return incoming.connection

    def _look(self, peer: int, deadline: float) -> None:
        if (over := self._over()) is not None:
            raise over
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out waiting for a message from rank {peer}")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_LOOK_EVERY_S)  # no descriptors left, perhaps: others may be closed meanwhile
                continue
            threading.Thread(target=self._welcome, args=(connection,), name="regrow-courier-hello", daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HELLO_S)
            head = wire.recv_frame(connection).head
            if head["type"] != "hello" or not hmac.compare_digest(str(head.get("token")), self._token):
                connection.close()
                return
            generation, peer = int(head["generation"]), int(head["rank"])
            connection.settimeout(None)
            _tune(connection)
        except (OSError, EOFError, KeyError, TypeError, ValueError):  # gone, or no rank of this run
            connection.close()
            return
        with self._changed:
            if generation >= self._fenced:
                incoming = self._incoming.setdefault((generation, peer), _Incoming())
                if incoming.connection is None:
                    incoming.connection = connection
                    self._changed.notify_all()
                    return
        connection.close()

    def sockets(self) -> list[socket.socket]:
        """Return all that are open."""
        found = [outgoing.connection for outgoing in self._outgoing.values()]
        found += [incoming.connection for incoming in self._incoming.values() if incoming.connection is not None]
        return [self._listener, *found]


_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


def _let_go_in_forks(courier: Courier) -> None:
    """A child, such as a loader's worker, would keep connections open when this process is killed."""
    if not _couriers:
        os.register_at_fork(after_in_child=_close_inherited)
    _couriers.add(courier)


def _close_inherited() -> None:
    for courier in _couriers:
        for each in courier.sockets():
            with contextlib.suppress(OSError):
                os.close(each.detach())  # not shut down: the connection is the parent's


class Receipt(dist.Work):
    """A message that is to be received: the handle that its caller waits for."""

    def __init__(
        self, courier: Courier, incoming: _Incoming, peer: int, name: str, tensor: torch.Tensor, timeout: timedelta
    ) -> None:
        super().__init__()
        self._courier = courier
        self._incoming = incoming
        self._timeout = timeout
        self.peer = peer
        self.name = name.encode()
        self.tensor = tensor
        self.done = False

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until it is there."""
        if not self.done:
            self._courier.wait(self, self._incoming, timeout or self._timeout)
        return True

    def synchronize(self) -> None:
        """Wait as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is there already."""
        return self.done

    def is_success(self) -> bool:
        """Whether it is there already."""
        return self.done

    def result(self) -> list[torch.Tensor]:
        """Return the tensor that it goes to."""
        return [self.tensor]

    def source_rank(self) -> int:
        """Return whose message it is."""
        return self.peer

    _source_rank = source_rank


class _Incoming:
    """What one rank sends to this one at one generation."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self.reading = threading.Lock()
        self._head = bytearray(_HEAD.size)
        self._posted: dict[bytes, deque[Receipt]] = {}
        self._early: dict[bytes, deque[bytearray]] = {}

    def post(self, receipt: Receipt) -> None:
        """Somebody wants a message; it may have come already."""
        with self.reading:
            early = self._early.get(receipt.name)
            if early:
                payload = early.popleft()
                _fill(receipt, len(payload), lambda memory: _copy(memory, payload))
            else:
                self._posted.setdefault(receipt.name, deque()).append(receipt)

    def has(self, name: bytes) -> bool:
        """Whether a message that nobody has asked for is there."""
        return bool(self._early.get(name))

    def early(self, name: bytes) -> bytearray | None:
        """Return a message that was there before anyone asked for it."""
        early = self._early.get(name)
        return early.popleft() if early else None

    def read(self, connection: socket.socket, look: Callable[[], None]) -> None:
        """Read one message, to where it is wanted, or put it by. ``look`` is asked, now and then, whether to go on."""
        _read(connection, memoryview(self._head), look)
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


class _Outgoing:
    """What this rank sends to another at one generation."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.connection = connection
        self._peer = peer
        self._changed = threading.Condition()
        self._rest: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        self._ended = False

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


def _fill(receipt: Receipt, size: int, write: Callable[[memoryview], None]) -> None:
    tensor = receipt.tensor
    if size != tensor.numel() * tensor.element_size():
        raise ValueError(
            f"rank {receipt.peer} sent {size} bytes, but a tensor of {tuple(tensor.shape)} and {tensor.dtype} "
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
    receipt.done = True


def _copy(memory: memoryview, payload: bytearray) -> None:
    memory[:] = payload


def _read(connection: socket.socket, memory: memoryview, look: Callable[[], None]) -> None:
    """Fill this memory. The socket has a time-out in the kernel, after which it is seen whether to go on."""
    while memory:
        try:
            count = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            look()
            continue
        if not count:
            raise EOFError("the connection was closed")
        memory = memory[count:]


def _end(connection: socket.socket | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _tune(connection: socket.socket) -> None:
    """Let nothing be held back, nothing be waited for without a look, and a host that is gone be noticed."""
    seconds, micros = divmod(int(_LOOK_EVERY_S * 1e6), 10**6)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", seconds, micros))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Not TCP_USER_TIMEOUT: it would also end a connection to a rank that lives and does not read for a while.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENT_S)
