"""Gives the journal of one rank to others over TCP, and gets theirs.

Whoever asks must know the run's secret (``door``). The frames are those of ``wire``: a request names a step and a
receiver, the answer is one frame for each record and one that ends them. Nothing here decides what is wanted.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from regrow import dial, wire
from regrow.door import Door
from regrow.errors import PeerLost
from regrow.journal import record
from regrow.journal.log import Journal
from regrow.journal.record import Channel, Damaged, Record

_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.25
_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 30, 10, 3


class Server:
    """Answers each connection in a thread of its own."""

    def __init__(self, journal: Journal, host: str, token: str, say: Callable[[str], None]) -> None:
        """``say`` tells of those who were sent away."""
        self._journal = journal
        self._changing = threading.Lock()
        self._open: set[socket.socket] = set()
        self._door = Door("the journal", host, token, self._answer, say)
        self.address: tuple[str, int] = self._door.address

    def _answer(self, connection: socket.socket, hello: dict[str, Any], address: Any) -> None:
        with self._changing:
            self._open.add(connection)
        try:
            connection.settimeout(None)  # it may be long until the next step is asked for; its end ends this thread
            _end_with_its_host(connection)
            while not self._door.closed:
                head = wire.recv_frame(connection).head
                step = int(head["step"])
                parts, kept_from = self._read(step, int(head["peer"]))
                for part in parts:
                    connection.sendall(wire.encode({"type": "record"}, part))
                facts = {"thinned": self._journal.thinned(step), "partial": self._journal.partial(step)}
                connection.sendall(wire.encode({"type": "end", "from": kept_from, **facts}))
        except (OSError, EOFError, KeyError, TypeError, ValueError):
            pass  # the other side is gone, or asks for what no rank would
        finally:
            with self._changing:
                self._open.discard(connection)
                connection.close()

    def _read(self, step: int, peer: int) -> tuple[list[bytes], int]:
        """Return the records of a step, and from which step on all are there: a later one if these cannot be had."""
        try:
            parts = self._journal.read(step, peer)
        except OSError:  # a spilled segment is gone
            return [], step + 1
        if any(len(part) > wire.MAX_BLOB_BYTES for part in parts):
            return [], step + 1
        return parts, self._journal.kept_from

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that listen and answer."""
        return self._door.threads

    def close(self) -> None:
        """Stop listening, drop all connections, and wait a moment for the threads to end."""
        self._door.stop()
        with self._changing:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that waits on it
        self._door.close()


def _end_with_its_host(connection: socket.socket) -> None:
    """Let a connection fail about a minute after its other side has vanished without a word.

    While nothing is under way the kernel asks, and the other side's kernel answers however long its process is idle;
    for what was sent and not taken there is a limit of its own.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_TIMEOUT_S * 1000))


class Messages(dict[Channel, deque[Record]]):
    """What one rank sent to another in one step. ``partial``: perhaps not all of it."""

    partial = False


class Fetcher:
    """Gets what one rank has sent to this one, a step ahead of its use."""

    def __init__(
        self,
        rank: int,
        address: tuple[str, int],
        token: str,
        me: int,
        *,
        at_home: bool = False,
        superseded: Callable[[], bool] = lambda: False,
    ) -> None:
        """``at_home``: both ranks are of one domain, so that what is asked for is kept for a moment only."""
        self._rank = rank
        self._me = me
        self._address = address
        self._token = token
        self._at_home = at_home
        self._superseded = superseded
        self._changing = threading.Lock()
        self._closed = False
        self._socket: socket.socket | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"regrow-fetch-{rank}")
        self._ahead: dict[int, Future[Messages]] = {}
        self.bytes_in = 0

    def get(self, step: int, *, then: int | None = None) -> Messages:
        """Return the messages of a step, and begin to fetch those of the step ``then``.

        Raises ``Damaged`` with the record's name, or ``PeerLost`` if the other rank is gone.
        """
        future = self._ahead.pop(step, None) or self._pool.submit(self._fetch, step)
        if then is not None and then not in self._ahead:
            self._ahead[then] = self._pool.submit(self._fetch, then)
        # No limit for all of it: it may be much. The socket has one for each piece.
        while not wait([future], _LOOK_EVERY_S).done:
            if self._superseded():
                raise PeerLost(f"a new generation began while step {step} of rank {self._rank} was fetched")
        return future.result()

    def _fetch(self, step: int) -> Messages:
        try:
            connection = self._socket or self._connect()
            connection.sendall(wire.encode({"type": "fetch", "step": step, "peer": self._me}))
            found = Messages()
            while (frame := wire.recv_parts(connection))[0]["type"] == "record":
                where = f"a record of step {step} in the journal of rank {self._rank}"
                item = record.read(memoryview(frame[1]), where)
                if item.step != step:
                    raise Damaged(f"{where} says that it is of step {item.step}")
                self.bytes_in += len(frame[1])
                found.setdefault(item.channel, deque()).append(item)
        except (OSError, EOFError) as error:
            self._disconnect()
            raise PeerLost(f"the journal of rank {self._rank} cannot be reached: {error}") from None
        except Damaged:
            self._disconnect()  # in the middle of an answer
            raise
        head = frame[0]
        if int(head["from"]) > step or (self._at_home and head["thinned"]):
            raise Damaged(f"step {step} is not in the journal of rank {self._rank} any more")
        found.partial = bool(head["partial"])
        return found

    def _connect(self) -> socket.socket:
        connection = dial.connect(self._address, _TIMEOUT_S, self._go_on)
        try:
            connection.settimeout(_TIMEOUT_S)
            with self._changing:  # from here on ``close`` knows of it
                self._go_on()
                self._socket = connection
        except OSError:
            connection.close()
            raise
        connection.sendall(wire.encode({"type": "hello", "token": self._token}))
        return connection

    def _go_on(self) -> None:
        if self._closed:
            raise ConnectionAbortedError("nobody wants it any more")

    def _disconnect(self) -> None:
        with self._changing:
            connection, self._socket = self._socket, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits on it
            connection.close()

    def close(self) -> None:
        """Drop the connection, also one that is just being made; nothing can be asked for afterwards."""
        with self._changing:
            self._closed = True
        self._disconnect()
        self._pool.shutdown(wait=False, cancel_futures=True)
