"""etcd's JSON gateway at several members: a request goes to one of them, and to the next if that one does not answer.

A request may therefore reach etcd twice, or once and late: what must not be done twice is the caller's to see to.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any

from regrow.agent.http_json import Connection
from regrow.agent.store import StoreLost

_BROKEN = (OSError, EOFError, ValueError)
NOT_FOUND = 5
COMPACTED = 11
# gRPC's codes for what would be answered in the same way by every member, at any time
_FINAL = {3, NOT_FOUND, 6, 7, 9, COMPACTED, 12, 16}


class Refused(Exception):
    """etcd has answered, and would answer the same again."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def b64(raw: bytes) -> str:
    """Return bytes as the gateway wants them."""
    return base64.b64encode(raw).decode("ascii")


def unb64(text: str) -> bytes:
    """Return the gateway's bytes."""
    return base64.b64decode(text)


class Etcd:
    """The members of one cluster. All its waits come from one number: how long etcd as a whole may be away.

    Within that time every member is tried twice, so that one that hangs leaves enough of it for the others.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], timeout_s: float) -> None:
        self._endpoints = list(endpoints)
        self._idle: dict[int, list[Connection]] = {at: [] for at in range(len(self._endpoints))}
        self._open: set[Connection] = set()
        self._at = 0
        self.timeout_s = timeout_s
        self.attempt_s = timeout_s / (2 * len(self._endpoints))
        self.local_address = "127.0.0.1"
        self._closed = False

    async def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of whichever member gives one. ``Refused``, or ``StoreLost`` if none does in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        for tries in range(1, 1 << 30):
            member = self._at
            try:
                async with asyncio.timeout(min(self.attempt_s, deadline - loop.time())):
                    return await self._ask(member, path, body)
            except _BROKEN as error:
                why = self.failed(member, error)
            if tries % len(self._endpoints) == 0:
                await asyncio.sleep(self.attempt_s / 4)  # all were tried: let them elect a leader
            if loop.time() >= deadline:
                raise self.lost(why)
        raise AssertionError("unreachable")

    def lost(self, why: str) -> StoreLost:
        """Return the error that says for how long nobody answered."""
        return StoreLost(f"etcd did not answer within {self.timeout_s:g} s (the last attempt: {why})")

    def failed(self, member: int, error: BaseException) -> str:
        """Turn to the next member, unless somebody has already; return what happened in words."""
        for connection in self._idle[member]:
            self._drop(connection)
        self._idle[member].clear()
        if self._at == member:
            self._at = (member + 1) % len(self._endpoints)
        host, port = self._endpoints[member]
        what = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        return f"{host}:{port}: {what}"

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the objects that one member sends for as long as it is seen to be in the cluster.

        Silence says nothing, so a silent member is asked for something that it can answer only together with a
        majority; an answer to that is yielded as an empty object. If it cannot answer, another is used from then
        on, and this iteration fails as a broken connection would.
        """
        member = self._at
        pending: asyncio.Task[dict[str, Any]] | None = None
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self.attempt_s):
                connection = await self._connect(member)
            lines = connection.lines(f"/v3/{path}", body)
            while True:
                pending = asyncio.create_task(_next(lines))
                while not (await asyncio.wait({pending}, timeout=self.attempt_s))[0]:
                    async with asyncio.timeout(self.attempt_s):
                        await self._ask(member, "kv/range", {"key": b64(b"\0"), "keys_only": True})
                    yield {}
                yield _checked(pending.result())
        except _BROKEN as error:
            raise ConnectionError(self.failed(member, error)) from None
        finally:
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            if connection is not None:
                self._drop(connection)

    def close(self) -> None:
        """Close all connections, and make no others."""
        self._closed = True
        for connection in list(self._open):
            self._drop(connection)

    async def _ask(self, member: int, path: str, body: dict[str, Any]) -> dict[str, Any]:
        idle = self._idle[member]
        connection = idle.pop() if idle else await self._connect(member)
        if not connection.reusable:
            self._drop(connection)
            connection = await self._connect(member)
        try:
            answer = await connection.post(f"/v3/{path}", body)
        except BaseException:
            self._drop(connection)  # whatever comes on it belongs to this request
            raise
        if connection.reusable and connection in self._open:
            idle.append(connection)
        else:
            self._drop(connection)
        return _checked(answer)

    async def _connect(self, member: int) -> Connection:
        if self._closed:
            raise StoreLost("the connection to etcd was closed")
        connection = await Connection.open(*self._endpoints[member])
        self._open.add(connection)
        self.local_address = connection.local_address
        return connection

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.close()


def _next(lines: AsyncIterator[dict[str, Any]]) -> Coroutine[Any, Any, dict[str, Any]]:
    async def step() -> dict[str, Any]:
        with contextlib.suppress(StopAsyncIteration):
            return await anext(lines)
        raise EOFError("the stream ended")

    return step()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what etcd says; ``Refused`` or a ``ValueError`` if it is an error."""
    if "error" not in answer:
        result: dict[str, Any] = answer.get("result", answer)
        return result
    told = answer["error"] if isinstance(answer["error"], dict) else answer
    code = int(told.get("grpc_code") or told.get("code") or 0)
    message = str(told.get("message") or told.get("error"))
    if code in _FINAL:
        raise Refused(code, message)
    raise ValueError(message)
