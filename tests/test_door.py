"""Strangers at every kind of port of this run: named, sent away, and never more of them than there is room for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from regrow import door, wire
from regrow.agent.link import LinkServer
from regrow.agent.store import MemoryStore
from regrow.agent.store_tcp import StoreServer
from regrow.courier import Courier
from regrow.journal.log import Journal
from regrow.journal.serve import Server
from regrow.peer.keeper import Keeper

TOKEN = "schlüssel"
DEADLINE_S = 20.0
GARBAGE = {
    "words of another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "noise": os.urandom(1 << 16),
    "a huge length": b"\xff" * 8,
    "a length of a gigabyte": (16).to_bytes(4) + (1 << 30).to_bytes(4),
    "brackets": (4000).to_bytes(4) + bytes(4) + b"[" * 4000,
    "no text": (4).to_bytes(4) + bytes(4) + b"\xff\xfe\xfd\xfc",
    "no type": (2).to_bytes(4) + bytes(4) + b"{}",
    "no token": wire.encode({"type": "hello"}),
    "a token that is none": wire.encode({"type": "hello", "token": ["a"], "generation": 1, "rank": 0}),
    "half a character": wire.encode({"type": "hello", "token": "\ud800", "generation": 1, "rank": 0}),
    "a wrong token": wire.encode({"type": "hello", "token": "guess", "generation": 1, "rank": 0}),
}


class Loop:
    """An event loop in a thread, for what the agent serves."""

    def __init__(self):
        self.problems = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.problems.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def close(self):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def nothing(node, session):
    """Somebody has left."""


class Nobody:
    """Owns links, and knows no worker."""

    def on_hello(self, link, head):
        return False


@pytest.fixture(params=["keeper", "courier", "journal", "store", "agent"])
def served(request, tmp_path):
    """A port of each kind: its address, what was said, and what went wrong in it."""
    said, loop = [], Loop()
    with contextlib.ExitStack() as stack:
        stack.callback(loop.close)
        match request.param:
            case "keeper":
                server = Keeper(tmp_path, "127.0.0.1", TOKEN, said.append)
            case "courier":
                server = Courier(0, "127.0.0.1", TOKEN, said.append)
            case "journal":
                journal = Journal(tmp_path, memory_bytes=1 << 20)
                stack.callback(journal.close)
                server = Server(journal, "127.0.0.1", TOKEN, said.append)
            case "store":
                server = StoreServer(MemoryStore(), TOKEN, nothing, said.append)
                port = loop.do(server.start("127.0.0.1", 0))
                server.address = ("127.0.0.1", port)
            case "agent":
                server = LinkServer(tmp_path / "sock", TOKEN, Nobody(), said.append)
                loop.do(server.start())
                server.address = str(tmp_path / "sock")
        stack.callback(lambda: loop.do(server.close()) if request.param in ("store", "agent") else server.close())
        yield request.param, server.address, said, loop.problems


def connect(address):
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.settimeout(DEADLINE_S)
    with contextlib.suppress(BlockingIOError):
        connection.connect(address)
        return connection
    connection.close()  # so many at once that the kernel does not take them: it says so for a unix socket
    time.sleep(0.01)
    return connect(address)


def ended(connection):
    """Wait until the other side has closed; with bytes unread, that is a reset."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass


def name(connection, kind):
    return f"process {os.getpid()} of this host" if kind == "agent" else f"127.0.0.1:{connection.getsockname()[1]}"


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def test_strangers_are_sent_away_and_named(served, monkeypatch):
    kind, address, said, problems = served
    for what, garbage in GARBAGE.items():
        told = len(said) + 1
        with connect(address) as stranger:
            with contextlib.suppress(OSError):  # it need not take all of it
                stranger.sendall(garbage)
            ended(stranger)
            until(lambda told=told: len(said) == told)
            assert said[-1].startswith(f"{name(stranger, kind)} was sent away from the {kind}: "), (what, said)
    with connect(address) as stranger:
        where = name(stranger, kind)
    until(lambda: len(said) == len(GARBAGE) + 1)
    assert said[-1] == f"{where} was sent away from the {kind}: it left before it had said who it is"
    assert said[-2].endswith("its token is not this run's") and TOKEN not in "".join(said)
    monkeypatch.setattr(door, "HELLO_S", 0.3)
    monkeypatch.setattr(f"regrow.agent.{'link' if kind == 'agent' else 'store_tcp'}.HELLO_S", 0.3)
    with connect(address) as silent, connect(address) as slow:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() < began + DEADLINE_S:
                slow.sendall(b"\0")  # never silent for long, and never done
                time.sleep(0.05)
        assert time.monotonic() < began + DEADLINE_S / 2
        ended(silent)
    until(lambda: len(said) == len(GARBAGE) + 3)
    assert not problems, problems


def test_so_many_and_no_more(served):
    kind, address, said, problems = served
    time.sleep(0.1)
    before, threads = descriptors(), threading.active_count()
    held = [connect(address) for _ in range(3 * door.MOST_UNKNOWN)]
    try:
        for early in held[: 2 * door.MOST_UNKNOWN]:
            ended(early)  # made room for the others
        until(lambda: descriptors() <= before + len(held) + door.MOST_UNKNOWN)
        assert threading.active_count() <= threads + door.MOST_UNKNOWN + 1
        until(lambda: bool(said) and "of more within this minute only the number is told" in said[-1])  # soon after
        assert len(said) <= 20
        with connect(address) as peer:  # one that knows the token is not sent away, however many others there are
            peer.sendall(wire.encode({"type": "hello", "token": TOKEN, "generation": 1, "rank": 0}))
            peer.settimeout(0.3)
            if kind == "store":
                assert b"welcome" in peer.recv(100)
            elif kind != "agent":
                with pytest.raises(TimeoutError):
                    peer.recv(1)
    finally:
        for each in held:
            each.close()
    left = before + (kind == "courier")  # which keeps a peer's connection for as long as its generation lasts
    until(lambda: descriptors() <= left and threading.active_count() <= threads)
    assert not problems, problems


def test_many_are_told_by_their_number():
    said, now = [], [0.0]
    refusals = door.Refusals("the keeper", said.append, lambda: now[0])
    for port in range(30):
        refusals.tell(("10.0.0.9", port), "why")
    assert len(said) == 20 and said[0] == "10.0.0.9:0 was sent away from the keeper: why"
    now[0] = 61.0
    refusals.tell(("fe80::1", 5, 0, 0), "why")
    assert said[20:] == [
        "10 more were sent away from the keeper within a minute",
        "[fe80::1]:5 was sent away from the keeper: why",
    ]
