"""The unix socket on which workers talk to their host's agent. What the frames mean is the crew's affair."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from regrow.door import HELLO_S, NO_TOKEN, Refusals, Unknown, reason, token_matches
from regrow.wire import Frame, encode, read_frame, read_hello

_PEER = struct.Struct("3i")


class Link:
    """One worker's connection. ``peer_pid`` comes from the kernel, not from what the worker says."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.closed = asyncio.Event()
        sock = writer.get_extra_info("socket")
        self.peer_pid: int = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[0]

    def send(self, head: dict[str, Any], blob: bytes = b"") -> None:
        """Queue a frame. Never waits: a worker that does not read must not hold up the others."""
        self.send_bytes(encode(head, blob))

    def send_bytes(self, frame: bytes) -> None:
        """Queue a frame that is encoded already."""
        if not self.closed.is_set() and not self._writer.is_closing():
            self._writer.write(frame)

    def close(self) -> None:
        """Drop the connection."""
        self._writer.close()


class LinkOwner(Protocol):
    """Who is told what happens on the links."""

    def on_hello(self, link: Link, head: dict[str, Any]) -> bool:
        """Return whether the worker behind the link is known; if not, the link is closed."""
        ...

    def on_frame(self, link: Link, frame: Frame) -> None:
        """A frame came."""
        ...

    def on_malformed(self, link: Link, error: Exception) -> None:
        """A frame came that makes no sense; the link is closed."""
        ...

    def on_closed(self, link: Link) -> None:
        """The link is gone, for whatever reason; no more frames come."""
        ...


class LinkServer:
    """Listens on a socket inside a directory that only this user can enter."""

    def __init__(self, path: Path, token: str, owner: LinkOwner, say: Callable[[str], None]) -> None:
        """``say`` tells of those who were sent away."""
        self.path = path
        self._refusals = Refusals("the agent", say)
        self._unknown: Unknown[asyncio.StreamWriter] = Unknown()
        self._token = token
        self._owner = owner
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._accept, str(self.path))

    async def close(self) -> None:
        """Drop every link and remove the socket."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(OSError):
            self.path.unlink()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        link = Link(writer)
        known = False
        try:
            head = await self._hello(reader, writer, link)
            known = head is not None and self._owner.on_hello(link, head)
            while known:
                self._owner.on_frame(link, await read_frame(reader))
        except (EOFError, OSError, TimeoutError, asyncio.CancelledError):
            pass  # however it ends, what matters is whether the process does
        except (KeyError, TypeError, ValueError) as error:
            if known:
                self._owner.on_malformed(link, error)
        finally:
            self._tasks.discard(task)
            link.closed.set()
            writer.close()
            if known:
                self._owner.on_closed(link)

    async def _hello(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: Link
    ) -> dict[str, Any] | None:
        """Return what a worker says first; ``None`` if it is none of this run's."""
        crowded, why = self._unknown.enter(writer), NO_TOKEN
        if crowded is not None:
            crowded.transport.abort()
        try:
            head = await asyncio.wait_for(read_hello(reader), HELLO_S)
            if head["type"] == "hello" and token_matches(head.get("token"), self._token):
                return head
        except (OSError, EOFError) as error:
            why = reason(error)
        finally:
            self._unknown.leave(writer)
        self._refusals.tell(f"process {link.peer_pid} of this host", why)
        return None


def group_of(pid: int) -> int | None:
    """Return a process's group: what a worker forked, or a wrapper script started, shares the one we gave it."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
