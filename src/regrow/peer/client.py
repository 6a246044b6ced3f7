"""A worker's side of a keeper: puts its snapshots into another host's memory, and gets them back from there."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from regrow import dial, wire
from regrow.ids import Step
from regrow.peer.keeper import Address, Pace, fill, send, tune
from regrow.peer.memory import Buffer, Damaged, Layout
from regrow.slots import Left

_ANSWER_S = 60.0


class Refused(RuntimeError):
    """A keeper does not take or have a snapshot; the message says why."""


class Client:
    """One connection to one keeper, made when it is first needed. Used by one thread; any may ``end`` it."""

    def __init__(self, address: Address, token: str, look: Callable[[], None]) -> None:
        """``look`` is asked, while the keeper is being reached, whether to go on, and raises if not."""
        self._address = address
        self._token = token
        self._look = look
        self._connection: socket.socket | None = None
        self._ended = False

    def _connected(self) -> socket.socket:
        if self._connection is None:
            connection = dial.connect(self._address, _ANSWER_S, self._look)
            tune(connection)
            connection.settimeout(_ANSWER_S)
            self._connection = connection
            if self._ended:  # looked at after the connection can be seen: whoever ends it later shuts it
                raise ConnectionError("it was ended while it was made")
            connection.sendall(wire.encode({"type": "hello", "token": self._token}))
        return self._connection

    def put(
        self,
        rank: int,
        generation: int,
        buffer: Buffer,
        layout: Layout,
        index: dict[str, Any],
        pace: Pace | None = None,
    ) -> None:
        """Return when the keeper has the snapshot whole. ``OSError`` if it cannot be reached any more."""
        connection = self._connected()
        sealed = buffer.head()
        if sealed is None:
            raise Damaged(f"the snapshot of rank {rank} is not whole any more")
        head = {"type": "put", "rank": rank, "generation": generation, "step": index["step"], "sizes": layout.sizes}
        connection.sendall(wire.encode({**head, "index_checksum": sealed.index_checksum}))
        if self._frame("ready", "kept").head["type"] == "kept":
            return  # it had it already, whole
        connection.settimeout(None)  # sendfile wants a socket that blocks; keepalive ends one whose other side is gone
        send(connection, buffer, layout, pace)
        connection.settimeout(_ANSWER_S)
        connection.sendall(wire.encode({"type": "index", "index": index}))
        self._expect("kept")

    def get(self, rank: int, step: Step, into: Buffer) -> None:
        """Bring a snapshot into this host's memory."""
        connection = self._connected()
        connection.sendall(wire.encode({"type": "get", "rank": rank, "step": step}))
        index = self._expect("snapshot")["index"]
        layout = Layout.of([size for size, _ in index["parts"]])
        into.take_in(layout, lambda memory: fill(connection, memory))
        into.seal(layout, {key: value for key, value in index.items() if key != "offsets"})

    def put_small(self, rank: int, generation: int, kind: str, step: Step, payload: bytes) -> None:
        """Return when the keeper has what a rank leaves of its own."""
        head = {"type": "small", "rank": rank, "generation": generation, "kind": kind, "step": step}
        self._connected().sendall(wire.encode(head, payload))
        self._expect("kept")

    def get_small(self, rank: int) -> Left:
        """Return what a rank has left of its own."""
        self._connected().sendall(wire.encode({"type": "get_small", "rank": rank}))
        head, blob = self._frame("left")
        starts, at = {}, 0
        for step, size in head["starts"]:
            starts[Step(step)] = blob[at : at + size]
            at += size
        live = None if head["live"] is None else (Step(head["live"][0]), blob[at:])
        return Left(starts, live)

    def drop_after(self, rank: int, generation: int, step: Step) -> None:
        """Let the keeper give up what it has of later steps from older generations."""
        head = {"type": "drop_after", "rank": rank, "generation": generation, "step": step}
        self._connected().sendall(wire.encode(head))
        self._expect("dropped")

    def _expect(self, kind: str) -> dict[str, Any]:
        return self._frame(kind).head

    def _frame(self, *kinds: str) -> wire.Frame:
        assert self._connection is not None
        try:
            frame = wire.recv_frame(self._connection)
        except EOFError as error:
            raise ConnectionError(str(error)) from None
        answer = frame.head
        if answer["type"] == "refused":
            raise Refused(str(answer.get("why")))
        if answer["type"] not in kinds:
            raise Damaged(f"a keeper answered {answer['type']!r} instead of {' or '.join(map(repr, kinds))}")
        return frame

    def end(self) -> None:
        """Wake whoever uses it; it is of no use any more."""
        self._ended = True
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
