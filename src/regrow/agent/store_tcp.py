"""The in-memory store over TCP: node 0's agent serves it, the other agents are clients. Frames as in ``wire``.

The first frame of a connection carries the run's secret; without it the connection is closed. Neither side ever blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from regrow.agent.porter import Porter, keep_alive
from regrow.agent.store import Change, Entry, Lease, LeaseLost, MemoryStore, StoreLost
from regrow.door import HELLO_S
from regrow.wire import Frame, encode, read_frame


class StoreServer:
    """Serves a ``MemoryStore``. ``on_ended(node, session)`` is called when the process of a node that had joined ends.

    That it has ended is certain only if it closed the connection, or the kernel did for it. A connection that broke
    otherwise says nothing: the node may be cut off, and its lease decides.
    """

    def __init__(
        self,
        store: MemoryStore,
        token: str,
        on_ended: Callable[[int, str], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        """``say`` tells of those who were sent away."""
        self._store = store
        self._on_ended = on_ended
        self._porter = Porter("the store", token, say)
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()
        self._peers: set[asyncio.Task[None]] = set()
        """Those of the clients that have said who they are."""

    async def start(self, host: str | list[str], port: int) -> int:
        """Listen, at one or several addresses; return the port. ``OSError`` if the address cannot be bound."""
        self._server = await asyncio.start_server(self._accept, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def drain(self, timeout_s: float) -> None:
        """Wait until the clients have gone: they still have to learn how the run ended."""
        if self._peers:
            await asyncio.wait(set(self._peers), timeout=timeout_s)

    async def close(self) -> None:
        """Stop listening and drop the clients."""
        if self._server is not None:
            self._server.close()
        for task in self._clients:
            task.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        watches: dict[int, asyncio.Task[None]] = {}
        joined: tuple[int, str] | None = None
        ended = False
        try:
            if not await self._porter.admits(reader, writer):
                return
            self._peers.add(task)
            while True:
                frame = await read_frame(reader)
                match frame.head["type"]:
                    case "joined":
                        joined = int(frame.head["node"]), str(frame.head["session"])
                    case "goodbye":
                        joined = None
                    case "watch":
                        number = int(frame.head["id"])
                        watches[number] = asyncio.create_task(self._feed(writer, number, str(frame.head["prefix"])))
                    case "unwatch":
                        if (feed := watches.pop(int(frame.head["id"]), None)) is not None:
                            feed.cancel()
                    case _:
                        writer.write(await self._answer(frame))
                        await writer.drain()
        except (EOFError, BrokenPipeError):
            ended = True  # the kernel says that the pipe is broken if it was reset after it had been closed
        except (OSError, TimeoutError, KeyError, ValueError, asyncio.CancelledError):
            pass  # whatever a client does wrong or however it goes, its connection ends and that is all
        finally:
            self._clients.discard(task)
            self._peers.discard(task)
            for feed in watches.values():
                feed.cancel()
            writer.close()
            if joined is not None and ended:
                await self._on_ended(*joined)

    async def _answer(self, frame: Frame) -> bytes:
        head, blob = frame
        reply: dict[str, Any] = {"type": "reply", "id": head["id"]}
        key = str(head["key"])
        lease = None if head.get("lease") is None else self._store.lease(int(head["lease"]))
        if lease is None and head.get("lease") is not None:
            return encode(reply | {"lease_lost": True, "kept": False})
        match head["type"]:
            case "get":
                entry = await self._store.get(key)
                reply["version"] = None if entry is None else entry.version
                return encode(reply, b"" if entry is None else entry.value)
            case "put":
                reply["version"] = await self._store.put(key, blob, lease)
            case "compare_and_set":
                reply["version"] = await self._store.compare_and_set(key, int(head["version"]), blob, lease)
            case "delete":
                reply["count"] = await self._store.delete(key, prefix=bool(head["prefix"]))
            case "keys":
                reply["keys"] = await self._store.keys(key)
            case "grant":
                granted = await self._store.grant(float(head["ttl_s"]))
                reply |= {"number": granted.number, "ttl_s": granted.ttl_s}
            case "keep" if lease is not None:
                reply["kept"] = await lease.keep()
            case "revoke" if lease is not None:
                await lease.revoke()
            case other:
                raise ValueError(f"unknown request {other!r}")
        return encode(reply)

    async def _feed(self, writer: asyncio.StreamWriter, number: int, prefix: str) -> None:
        async for change in self._store.watch(prefix):
            head = {"type": "change", "id": number, "key": change.key, "version": change.version}
            head["deleted"] = change.value is None
            writer.write(encode(head, change.value or b""))


class TcpLease:
    """A ``Lease`` of the store in another agent. Whoever is cut off from it simply does not renew any more."""

    def __init__(self, store: TcpStore, number: int, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.number = number
        self._store = store

    async def keep(self) -> bool:
        """See ``Lease``."""
        return await self._store.keep(self)

    async def revoke(self) -> None:
        """See ``Lease``."""
        await self._store.revoke(self.number)


class TcpStore:
    """A ``ControlStore`` that lives in another agent."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int, str]
    ) -> None:
        self._writer = writer
        self._address = address
        self._presence: TcpStore | None = None
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[Frame]] = {}
        self._watches: dict[int, asyncio.Queue[Change | None]] = {}
        self._lost = False
        self._reader_task = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, host: str, port: int, token: str) -> TcpStore:
        """Connect once. ``OSError`` if nobody answers, ``PermissionError`` if it refuses us."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            keep_alive(writer)
            writer.write(encode({"type": "hello", "role": "agent", "token": token}))
            answer = await asyncio.wait_for(read_frame(reader), HELLO_S)
        except EOFError:
            writer.close()
            raise ConnectionError("it closed the connection at once") from None
        except BaseException:
            writer.close()
            raise
        if answer.head["type"] != "welcome":
            writer.close()
            raise PermissionError(str(answer.head.get("error", "it is not a regrow agent")))
        return cls(reader, writer, (host, port, token))

    @property
    def local_address(self) -> str:
        """The address of this host that the store's host can reach."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def joined(self, node: int, session: str) -> None:
        """From now on the server takes the end of this process for the end of the node's session.

        It is told by a connection of its own, on which the server sends nothing: one that is closed while something in
        it is unread would be reset, which proves nothing. ``OSError`` if it cannot be made.
        """
        if self._presence is None or self._presence._lost:
            self._presence = await TcpStore.connect(*self._address)
        self._presence._writer.write(encode({"type": "joined", "node": node, "session": session}))

    async def close(self) -> None:
        """Say goodbye and disconnect."""
        if self._presence is not None:
            await self._presence.close()
        with contextlib.suppress(OSError):
            self._writer.write(encode({"type": "goodbye"}))
            await self._writer.drain()
        self._reader_task.cancel()
        self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await read_frame(reader)
                number = int(frame.head["id"])
                if frame.head["type"] == "change":
                    if (queue := self._watches.get(number)) is not None:
                        value = None if frame.head["deleted"] else frame.blob
                        queue.put_nowait(Change(frame.head["key"], value, frame.head["version"]))
                elif (future := self._replies.pop(number, None)) is not None and not future.done():
                    future.set_result(frame)
        except (EOFError, OSError, KeyError, ValueError):
            pass  # told to everyone who waits, below
        finally:
            self._lost = True
            for future in self._replies.values():
                if not future.done():
                    future.set_exception(StoreLost("the connection to node 0 is lost"))
            for queue in self._watches.values():
                queue.put_nowait(None)

    async def _ask(self, kind: str, key: str, blob: bytes = b"", **fields: Any) -> Frame:
        if self._lost:
            raise StoreLost("the connection to node 0 is lost")
        number = next(self._numbers)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode({"type": kind, "id": number, "key": key, **fields}, blob))
        try:
            return await future
        finally:
            self._replies.pop(number, None)

    async def get(self, key: str) -> Entry | None:
        """See ``ControlStore``."""
        frame = await self._ask("get", key)
        return None if frame.head["version"] is None else Entry(frame.blob, frame.head["version"])

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """See ``ControlStore``."""
        return int(_written(await self._ask("put", key, value, lease=_number(lease)))["version"])

    async def compare_and_set(self, key: str, version: int, value: bytes, lease: Lease | None = None) -> int | None:
        """See ``ControlStore``."""
        frame = await self._ask("compare_and_set", key, value, version=version, lease=_number(lease))
        new: int | None = _written(frame)["version"]
        return new

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """See ``ControlStore``."""
        return int((await self._ask("delete", key, prefix=prefix)).head["count"])

    async def keys(self, prefix: str) -> list[str]:
        """See ``ControlStore``."""
        return [str(key) for key in (await self._ask("keys", prefix)).head["keys"]]

    async def watch(self, prefix: str) -> AsyncIterator[Change]:
        """See ``ControlStore``."""
        if self._lost:
            raise StoreLost("the connection to node 0 is lost")
        number = next(self._numbers)
        queue = self._watches[number] = asyncio.Queue()
        self._writer.write(encode({"type": "watch", "id": number, "prefix": prefix}))
        try:
            while (change := await queue.get()) is not None:
                yield change
            raise StoreLost("the connection to node 0 is lost")
        finally:
            del self._watches[number]
            if not self._lost:
                self._writer.write(encode({"type": "unwatch", "id": number}))

    # ------------------------------------------------------------------ leases

    async def grant(self, ttl_s: float) -> TcpLease:
        """See ``ControlStore``."""
        if ttl_s <= 0:
            raise ValueError(f"a lease needs a positive time to live, got {ttl_s}")
        head = (await self._ask("grant", "", ttl_s=ttl_s)).head
        return TcpLease(self, int(head["number"]), float(head["ttl_s"]))

    async def keep(self, lease: TcpLease) -> bool:
        """Renew a lease; False if it is over."""
        return bool((await self._ask("keep", "", lease=lease.number)).head["kept"])

    async def revoke(self, number: int) -> None:
        """See ``ControlStore``."""
        await self._ask("revoke", "", lease=number)


def _number(lease: Lease | None) -> int | None:
    if lease is None:
        return None
    if not isinstance(lease, TcpLease):
        raise LeaseLost("the lease is not of this store")
    return lease.number


def _written(answer: Frame) -> dict[str, Any]:
    if answer.head.get("lease_lost"):
        raise LeaseLost("the lease is over")
    return answer.head
