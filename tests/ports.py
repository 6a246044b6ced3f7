"""What the processes of a job listen at, whichever network namespace they are in; and strangers who come there."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

from regrow import wire

_LISTEN = "0A"
GARBAGE = {
    "noise": b"\xf7" + os.urandom(100_000),
    "a huge length": b"\xff" * 8,
    "a wrong token": wire.encode({"type": "hello", "token": "guess", "generation": 1, "rank": 0}),
    "nothing": b"",
}


class Port(NamedTuple):
    """An address that a process listens at."""

    host: str
    port: int
    pid: int


def job_of(variable: str, value: str) -> list[psutil.Process]:
    """Return the processes below this one that have this in their environment."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.environ().get(variable) == value:
                found.append(process)
    return found


def _inodes(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _host(digits: str) -> str:
    words = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    return str(ipaddress.ip_address(words))


def listening(processes: Iterable[psutil.Process]) -> list[Port]:
    """Return all that these processes listen at."""
    found = []
    for process in processes:
        with contextlib.suppress(OSError):  # it has just ended
            own = _inodes(process.pid)
            for table in ("tcp", "tcp6"):
                for line in Path(f"/proc/{process.pid}/net/{table}").read_text().splitlines()[1:]:
                    _, local, _, state, *_, inode = line.split()[:10]
                    if state == _LISTEN and inode in own:
                        host, _, port = local.partition(":")
                        found.append(Port(_host(host), int(port, 16), process.pid))
    return found


class Strangers:
    """One of each kind at each port. Those who get in say what they have to say, and stay."""

    def __init__(self, ports: Iterable[Port]) -> None:
        self._held: list[socket.socket] = []
        self.let_in: dict[Port, dict[str, int]] = {}
        """By port, which local ports those came from who could connect at all."""
        self.unanswered: set[Port] = set()
        tried = [(port, kind, self._knock(port)) for port in ports for kind in GARBAGE]
        time.sleep(0.5)
        for port, kind, connection in tried:
            answer = select.poll()
            answer.register(connection, select.POLLOUT)
            if not answer.poll(0):
                self.unanswered.add(port)
                continue
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            assert not error, (port, os.strerror(error))
            self.let_in.setdefault(port, {})[kind] = connection.getsockname()[1]
            with contextlib.suppress(OSError):  # what is sent away need not have read all
                connection.send(GARBAGE[kind])

    def _knock(self, port: Port) -> socket.socket:
        connection = socket.socket(socket.AF_INET6 if ":" in port.host else socket.AF_INET)
        connection.setblocking(False)
        connection.connect_ex((port.host, port.port))
        self._held.append(connection)
        return connection

    def close(self) -> None:
        """Leave."""
        for connection in self._held:
            connection.close()
