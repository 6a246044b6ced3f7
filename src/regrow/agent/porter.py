"""Lets a run's agents in at a port of this one, and sends everybody else away, with the address and the reason.

What ``door`` does for threads is done here in the event loop of an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from regrow.door import CROWDED, HELLO_S, NO_TOKEN, Refusals, Unknown, reason, token_matches
from regrow.wire import encode, read_hello


def keep_alive(writer: asyncio.StreamWriter) -> None:
    """Let the kernel notice a peer whose host vanished: no FIN will ever come from it."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 15000)):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Porter:
    """Stands at one port; ``what`` it leads to."""

    def __init__(self, what: str, token: str, say: Callable[[str], None]) -> None:
        self._token = token
        self._refusals = Refusals(what, say)
        self._unknown: Unknown[asyncio.StreamWriter] = Unknown()

    async def admits(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Let a connection say who it is; tell of one that is none of this run's."""
        keep_alive(writer)
        crowded, why = self._unknown.enter(writer), NO_TOKEN
        if crowded is not None:
            crowded.transport.abort()
        try:
            hello = await asyncio.wait_for(read_hello(reader), HELLO_S)
            if hello["type"] == "hello" and token_matches(hello.get("token"), self._token):
                writer.write(encode({"type": "welcome"}))
                return True
            writer.write(encode({"type": "refused", "error": "the token is not this run's"}))
        except (OSError, EOFError) as error:
            why = reason(error)
        finally:
            waited_for = self._unknown.leave(writer)
        self._refusals.tell(writer.get_extra_info("peername"), why if waited_for else CROWDED)
        return False
