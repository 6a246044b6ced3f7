"""Keeps the snapshots of other hosts' ranks in this host's memory, and gives them back.

Owned by the agent, so that they outlive every worker. A thread serves each connection (``door``); what comes in
is read straight into shared memory, what goes out is sent from there by the kernel. What is no snapshot, or does not
match its checksums, is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow import wire
from regrow.door import Door, name_of
from regrow.ids import Step
from regrow.peer.memory import Buffer, Damaged, Layout, NoRoom, Shelf, check, verify
from regrow.slots import Left, Slots

_NAME = re.compile(r"rank(\d+)\.0")
_SMALL = re.compile(r"rank(\d+)\.small\..*")
MAX_PARTS = 1 << 20

Address = tuple[str, int]


def kept(directory: Path) -> dict[int, Shelf]:
    """Return what is kept in a directory, by rank; any process of this host may look."""
    names = [_NAME.fullmatch(path.name) for path in directory.glob("rank*.0")]
    return {int(name.group(1)): Shelf(directory / f"rank{name.group(1)}") for name in names if name is not None}


def slots_of(directory: Path, rank: int) -> Slots:
    """Return where a rank of another host has left its own small state."""
    return Slots(directory / f"rank{rank}.small")


def kept_small(directory: Path) -> dict[int, Left]:
    """Return what ranks of other hosts have left here of their own small state."""
    names = {_SMALL.fullmatch(path.name) for path in directory.glob("rank*.small.*")}
    ranks = sorted({int(name.group(1)) for name in names if name is not None})
    return {rank: slots_of(directory, rank).left() for rank in ranks}


class Keeper:
    """Serves until it is closed. ``say`` tells the person who watches."""

    def __init__(self, directory: Path, host: str, token: str, say: Callable[[str], None], port: int = 0) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        """Where snapshots of other hosts' ranks lie."""
        self._say = say
        self._lock = threading.Lock()
        self._writers: dict[int, socket.socket] = {}
        self._generations: dict[int, int] = {}
        """In which generation each rank has last spoken as one that writes: what an older one says is late."""
        self._slots: dict[int, Slots] = {}
        self._shelves: dict[int, Shelf] = {}
        self._open: set[socket.socket] = set()
        self._door = Door("the keeper", host, token, self._serve, say, port=port)
        self.address: Address = self._door.address

    def close(self) -> None:
        """Serve nobody any more; what is kept stays where it is."""
        self._door.stop()
        with self._lock:
            there = [*self._open]
        for each in there:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._door.close()

    def _serve(self, connection: socket.socket, hello: dict[str, Any], address: Any) -> None:
        with self._lock:
            self._open.add(connection)
        try:
            tune(connection)
            while not self._door.closed:
                self._answer(connection, *wire.recv_frame(connection))
        except EOFError:
            pass  # it has said all it had to say
        except (OSError, KeyError, TypeError, ValueError, Damaged) as error:
            if not self._door.closed:
                self._say(f"{name_of(address)} makes no sense as a peer of this run, or was cut off: {error}")
        finally:
            with self._lock:
                self._open.discard(connection)
                for rank in [rank for rank, other in self._writers.items() if other is connection]:
                    del self._writers[rank]
            connection.close()

    def _answer(self, connection: socket.socket, head: dict[str, Any], blob: bytes) -> None:
        match head["type"]:
            case "put":
                self._put(connection, int(head["rank"]), int(head["generation"]), head)
            case "get":
                self._get(connection, int(head["rank"]), Step(int(head["step"])))
            case "small":
                self._small(connection, int(head["rank"]), int(head["generation"]), head, blob)
            case "get_small":
                self._get_small(connection, int(head["rank"]))
            case "drop_after":
                self._drop_after(connection, int(head["rank"]), int(head["generation"]), Step(int(head["step"])))
            case other:
                raise ValueError(f"unknown request {other!r}")

    def _shelf(self, rank: int) -> Shelf:
        """Return a rank's shelf, always the same: to map a large one takes a while."""
        return self._shelves.setdefault(rank, Shelf(self.directory / f"rank{rank}"))

    def _put(self, connection: socket.socket, rank: int, generation: int, head: dict[str, Any]) -> None:
        """Take a snapshot in; nobody sees it before all of it is here and matches."""
        sizes = [int(size) for size in head["sizes"]]
        if len(sizes) > MAX_PARTS or min(sizes, default=0) < 0:
            raise ValueError("not the parts of a snapshot")
        self._become_writer(connection, rank, generation)
        layout = Layout.of(sizes)
        step = Step(int(head["step"]))
        if self._has(rank, step, int(head["index_checksum"])):
            connection.sendall(wire.encode({"type": "kept"}))
            return
        buffer = self._shelf(rank).next(step)
        try:
            parts = buffer.open(layout)
        except NoRoom as error:
            connection.sendall(wire.encode({"type": "refused", "why": str(error)}))
            return
        connection.sendall(wire.encode({"type": "ready"}))
        fill(connection, buffer.body(layout))
        index = wire.recv_frame(connection).head["index"]
        name = f"the snapshot of rank {rank} at step {index['step']}"
        try:
            verify(index, parts, name)
        except Damaged as error:
            self._say(f"{error}; it is not kept")
            connection.sendall(wire.encode({"type": "refused", "why": str(error)}))
            return
        with self._lock:
            if self._writers.get(rank) is not connection:
                raise ValueError(f"rank {rank} has a newer writer")
            buffer.seal(layout, {key: value for key, value in index.items() if key != "offsets"})
        connection.sendall(wire.encode({"type": "kept"}))

    def _has(self, rank: int, step: Step, index_checksum: int) -> bool:
        """Say whether this very snapshot is kept already, as it is after a recovery, and every part of it matches.

        It may be the only step of which everyone has a snapshot: to take it in again would give it up meanwhile.
        """
        found = self._shelf(rank).whole().get(step)
        head = None if found is None else found.head()
        if found is None or head is None or head.index_checksum != index_checksum:
            return False
        name = f"the snapshot of rank {rank} at step {step}"
        try:
            index, parts = found.read(name)
            check(index, parts, name)
        except Damaged as error:
            self._say(f"{error}; it is taken in again")
            return False
        return True

    def _drop_after(self, connection: socket.socket, rank: int, generation: int, step: Step) -> None:
        """A rank goes on at a step: what older generations have left of later ones is a future that was given up."""
        self._become_writer(connection, rank, generation)
        with self._lock:  # nobody seals one meanwhile
            self._shelf(rank).drop_unless(lambda head: head.step <= step or head.generation >= generation)
        connection.sendall(wire.encode({"type": "dropped"}))

    def _small(
        self, connection: socket.socket, rank: int, generation: int, head: dict[str, Any], payload: bytes
    ) -> None:
        """Keep what a rank leaves of its own at a step's start, or within a step."""
        self._become_writer(connection, rank, generation)
        slots = self._slots.setdefault(rank, slots_of(self.directory, rank))
        (slots.start if head["kind"] == "start" else slots.live)(Step(int(head["step"])), payload)
        connection.sendall(wire.encode({"type": "kept"}))

    def _get_small(self, connection: socket.socket, rank: int) -> None:
        left = slots_of(self.directory, rank).left()
        parts = [*left.starts.items(), *([left.live] if left.live is not None else [])]
        head = {
            "type": "left",
            "starts": [[step, len(payload)] for step, payload in left.starts.items()],
            "live": None if left.live is None else [left.live[0], len(left.live[1])],
        }
        connection.sendall(wire.encode(head, b"".join(payload for _, payload in parts)))

    def _become_writer(self, connection: socket.socket, rank: int, generation: int) -> None:
        """One process writes a rank's snapshots: a newer generation's ends an older one's."""
        with self._lock:
            newest = self._generations.get(rank, generation)
            if newest > generation:
                raise ValueError(f"rank {rank} writes at generation {newest}, this is {generation}")
            self._generations[rank] = generation
            known = self._writers.get(rank)
            if known is not None and known is not connection:
                with contextlib.suppress(OSError):
                    known.shutdown(socket.SHUT_RDWR)
            self._writers[rank] = connection

    def _get(self, connection: socket.socket, rank: int, step: Step) -> None:
        found = self._shelf(rank).whole().get(step)
        if found is None:
            connection.sendall(wire.encode({"type": "refused", "why": f"step {step} of rank {rank} is not kept here"}))
            return
        try:
            index, parts = found.read(f"the snapshot of rank {rank} at step {step}")
        except Damaged as error:
            connection.sendall(wire.encode({"type": "refused", "why": str(error)}))
            return
        connection.sendall(wire.encode({"type": "snapshot", "index": index}))
        send(connection, found, Layout.of([len(part) for part in parts]))


def fill(connection: socket.socket, memory: memoryview) -> None:
    """Read into memory until it is full."""
    while memory:
        count = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection was closed in the middle of a snapshot")
        memory = memory[count:]


Pace = Callable[[socket.socket, int], int]
"""Told how much of a snapshot is left, says how much of it may go over a connection now. May wait for that."""


def send(connection: socket.socket, buffer: Buffer, layout: Layout, pace: Pace | None = None) -> None:
    """Send a snapshot's parts from where they lie, at once or as ``pace`` says."""
    descriptor, start = buffer.file()
    try:
        at = start
        while at < layout.end:
            count = layout.end - at
            if pace is not None:
                count = min(count, pace(connection, count))
            at += os.sendfile(connection.fileno(), descriptor, at, count)
    finally:
        os.close(descriptor)


def tune(connection: socket.socket) -> None:
    """Let a host that is gone be noticed, and nothing be held back."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 15000)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
