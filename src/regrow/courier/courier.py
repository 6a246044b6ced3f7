"""Messages from rank to rank over sockets of their own: what the stages of a pipeline say to each other.

gloo reads in a thread of its own, forgets a message that is half read when its connection breaks, and cannot be called
off; so each wait for one had to be made in yet another thread. Here the thread that wants a message reads it, straight
into the tensor, and whoever must wake it shuts the socket. A message is sent at once as far as the kernel takes it; a
thread writes the rest, so that sending never blocks, in whichever order both sides send and receive.

One connection for each direction (``stream``), made by the sender; a hello says who it is, and of which generation.
Nothing of an older generation is ever read. Messages of one name arrive in order; those of different names may be
received in any. How a message lies in its stream is not known here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regrow import dial, wire
from regrow.courier.stream import LOOK_EVERY_S, Incoming, Outgoing, Wanted, tune
from regrow.door import Door
from regrow.errors import PeerLost

_HELLO_S = 10.0
_NO_TIMEOUT = timedelta(0)

Address = tuple[str, int]


class Courier:
    """All messages of one rank. Used by the thread that trains and by backward's; any thread may ``sever``."""

    def __init__(self, rank: int, host: str, token: str, say: Callable[[str], None]) -> None:
        """``say`` tells of those who were sent away."""
        self._rank = rank
        self._token = token
        self._changed = threading.Condition()
        self._generation = 0
        self._fenced = 0
        """Generations below this one are over."""
        self._addresses: Sequence[Address] = ()
        self._connecting = threading.Lock()
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[tuple[int, int], Incoming] = {}
        self.waiting = False
        """Whether a message is waited for right now."""
        self.waited_s = 0.0
        """How long messages were waited for in all, reading them included."""
        self._door = Door("the courier", host, token, self._welcome, say)
        self.address: Address = self._door.address
        _let_go_in_forks(self)

    # generations -----------------------------------------------------------------------------------------------------

    def resume(self, generation: int, addresses: Sequence[Address]) -> None:
        """A generation begins: what is left of older ones is dropped."""
        with self._changed:
            self._generation = generation
            self._fenced = max(self._fenced, generation)
            self._addresses = addresses
            old: list[Outgoing | Incoming] = [*self._outgoing.values()]
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
            open_: list[Outgoing | Incoming] = [*self._outgoing.values()] if self._generation < below else []
            open_ += [connection for key, connection in self._incoming.items() if key[0] < below]
            self._changed.notify_all()
        for connection in open_:
            connection.end()

    def close(self) -> None:
        """Drop all connections and listen no more."""
        self._door.stop()
        self.sever(below=1 << 62)
        with self._changed:
            old: list[Outgoing | Incoming] = [*self._outgoing.values(), *self._incoming.values()]
        for connection in old:
            connection.close()
        self._door.close()

    def _over(self) -> PeerLost | None:
        if self._generation >= self._fenced:
            return None
        return PeerLost(
            f"generation {self._generation} ended while messages were under way", generation=self._generation
        )

    # sending ---------------------------------------------------------------------------------------------------------

    def send(self, peer: int, name: str, payload: memoryview, *, stays: bool, generation: int | None = None) -> None:
        """Send a message. ``stays``: its memory will not change before ``flush`` returns or the generation ends.

        ``generation``: the only one in which the caller wants it sent.
        """
        self._go_on()
        if generation not in (None, self._generation):
            raise PeerLost(f"generation {generation} is over", generation=self._generation)
        outgoing = self._outgoing.get(peer)
        if outgoing is None:
            with self._connecting:  # one connection, whichever threads come first
                outgoing = self._outgoing.get(peer) or self._connect(peer)
        try:
            outgoing.send(name.encode(), payload, stays)
        except OSError as error:
            raise self._over() or self._lost(peer, error) from None

    def flush(self) -> None:
        """Wait until the kernel has taken all that was sent."""
        began_s = time.monotonic()
        for peer, outgoing in list(self._outgoing.items()):
            self.waiting = True
            try:
                while not outgoing.flushed(LOOK_EVERY_S):
                    self._go_on()
            except OSError as error:
                raise self._over() or self._lost(peer, error) from None
            finally:
                self.waiting = False
        self.waited_s += time.monotonic() - began_s

    def _connect(self, peer: int) -> Outgoing:
        generation = self._generation
        hello = {"type": "hello", "token": self._token, "generation": generation, "rank": self._rank}
        try:
            outgoing = Outgoing(dial.connect(self._addresses[peer], _HELLO_S, self._go_on), peer)
        except OSError as error:
            raise self._over() or self._lost(peer, error) from None
        try:
            outgoing.open(wire.encode(hello))
        except OSError as error:
            outgoing.close()
            raise self._over() or self._lost(peer, error) from None
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
        wanted = Wanted(peer, name.encode(), tensor)
        incoming.post(wanted)
        return Receipt(self, incoming, wanted, timeout)

    def take(self, peer: int, name: str, timeout: timedelta, *, generation: int | None = None) -> bytearray:
        """Wait for a message of any size, and return it. ``generation``: the only one in which the caller wants it."""
        incoming = self._from(peer, generation)
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
                if not incoming.stirs():
                    return False
                self._read(incoming, peer, time.monotonic() + _HELLO_S)
        return True

    def _from(self, peer: int, generation: int | None = None) -> Incoming:
        with self._changed:
            if generation not in (None, self._generation):
                raise PeerLost(f"generation {generation} is over", generation=self._generation)
            key = (self._generation, peer)
            incoming = self._incoming.get(key)
            if incoming is None:
                incoming = self._incoming[key] = Incoming(self._generation)
            return incoming

    def wait(self, wanted: Wanted, incoming: Incoming, timeout: timedelta) -> None:
        """Read from a rank until a message is there."""
        deadline = time.monotonic() + timeout.total_seconds()
        with self._listening(wanted.peer), incoming.reading:
            while not wanted.done:
                self._read(incoming, wanted.peer, deadline)

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

    def _read(self, incoming: Incoming, peer: int, deadline: float) -> None:
        connection = self._connected(incoming, peer, deadline)
        incoming.read(connection, lambda: self._look(incoming, peer, deadline))

    def _connected(self, incoming: Incoming, peer: int, deadline: float) -> socket.socket:
        if incoming.connection is None:
            with self._changed:
                while incoming.connection is None:
                    self._look(incoming, peer, deadline)
                    self._changed.wait(LOOK_EVERY_S)
        return incoming.connection

    def _go_on(self) -> None:
        if (over := self._over()) is not None:
            raise over

    def _look(self, incoming: Incoming, peer: int, deadline: float) -> None:
        self._go_on()
        if incoming.generation < self._fenced:  # the next one has begun already: nothing comes here any more
            raise PeerLost(f"generation {incoming.generation} is over", generation=incoming.generation)
        if time.monotonic() > deadline:
            raise RuntimeError(f"timed out waiting for a message from rank {peer}")

    def _welcome(self, connection: socket.socket, hello: dict[str, Any], address: Any) -> None:
        try:
            generation, peer = int(hello["generation"]), int(hello["rank"])
            connection.settimeout(None)
            tune(connection)
        except (OSError, KeyError, TypeError, ValueError):  # gone, or no rank
            connection.close()
            return
        with self._changed:
            if generation >= self._fenced:
                incoming = self._incoming.setdefault((generation, peer), Incoming(generation))
                if incoming.connection is None:
                    incoming.connection = connection
                    self._changed.notify_all()
                    return
        connection.close()

    def sockets(self) -> list[socket.socket]:
        """Return all that are open."""
        found = [outgoing.connection for outgoing in self._outgoing.values()]
        found += [incoming.connection for incoming in self._incoming.values() if incoming.connection is not None]
        return [self._door.listener, *found]


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

    def __init__(self, courier: Courier, incoming: Incoming, wanted: Wanted, timeout: timedelta) -> None:
        super().__init__()
        self._courier = courier
        self._incoming = incoming
        self._wanted = wanted
        self._timeout = timeout

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until it is there."""
        if not self._wanted.done:
            self._courier.wait(self._wanted, self._incoming, timeout or self._timeout)
        return True

    def synchronize(self) -> None:
        """Wait as ``wait`` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is there already."""
        return self._wanted.done

    def is_success(self) -> bool:
        """Whether it is there already."""
        return self._wanted.done

    def result(self) -> list[torch.Tensor]:
        """Return the tensor that it goes to."""
        return [self._wanted.tensor]

    def source_rank(self) -> int:
        """Return whose message it is."""
        return self._wanted.peer

    _source_rank = source_rank
