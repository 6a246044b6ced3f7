"""That an agent's process is there, as its kernel tells it: connections on which nothing is said.

A lease tells of whoever is silent, after a while. A process that was killed is told of at once: its kernel closes what
it had open, and refuses whoever asks for it from then on. Both together are the sign, and nothing else is: a time-out,
a reset, a refusal by something in between may come from a host that lives and is only cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from regrow.agent.porter import Porter, keep_alive
from regrow.wire import encode, read_frame

_DYING_S = 0.01  # a process that is being taken down may have closed one socket and not yet the next
_PAUSE_S = 0.2

Address = tuple[str, int]


class Presence:
    """Listens, and holds the connections of those who know the run's token for as long as this process lives."""

    def __init__(self, token: str, say: Callable[[str], None]) -> None:
        """``say`` tells of those who were sent away."""
        self._porter = Porter("the agent", token, say)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> int:
        """Listen; return the port. ``OSError`` if the address is not this host's."""
        self._server = await asyncio.start_server(self._accept, host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Say that this process is gone. Whoever calls this must hold no rank any more."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if await self._porter.admits(reader, writer):
                await reader.read(1)  # until the other one goes
        except (EOFError, OSError, KeyError, TypeError, ValueError, asyncio.CancelledError):
            pass  # however it ends: it is the other side that watches
        finally:
            self._tasks.discard(task)
            writer.close()


async def until_gone(address: Address, token: str, patience_s: float) -> None:
    """Return when the process that listens there is gone. Whoever cannot be judged in that way is never judged.

    It must have been spoken to, have closed that connection, and refuse a new one. ``patience_s``: how long a host
    that does not answer is waited for, and the longest pause before it is tried again.
    """
    closed, pause_s = False, _PAUSE_S
    while True:
        try:
            async with asyncio.timeout(patience_s):
                reader, writer = await _greet(address, token)
        except ConnectionRefusedError:
            if closed:
                return
        except (OSError, EOFError, KeyError, ValueError):
            pass  # cut off, stopped, or just being taken down
        else:
            closed, pause_s = await _closed(reader, writer), _PAUSE_S
            if closed:
                pause_s = _DYING_S
                continue
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, patience_s)


async def _greet(address: Address, token: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*address)
    try:
        keep_alive(writer)
        writer.write(encode({"type": "hello", "token": token}))
        answer = (await read_frame(reader)).head
        if answer["type"] != "welcome":
            raise ValueError("it is no agent of this run")
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Wait for a connection's end; return whether the other side closed it, and it did not break."""
    try:
        with contextlib.suppress(OSError):
            return await reader.read(1) == b""
        return False
    finally:
        writer.close()
