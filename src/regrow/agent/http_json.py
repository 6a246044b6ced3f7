"""POST JSON over one HTTP/1.1 connection: as much of the protocol as etcd's gateway speaks, without blocking."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from regrow.agent.porter import keep_alive


class Connection:
    """One connection, one request at a time. Whatever goes wrong is an ``OSError``, ``EOFError`` or ``ValueError``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._reusable = True

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connect; how long that may take is the caller's to say."""
        reader, writer = await asyncio.open_connection(host, port)
        keep_alive(writer)
        return cls(reader, writer, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    @property
    def local_address(self) -> str:
        """The address of this host on this connection."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def reusable(self) -> bool:
        """Whether another request can be made, as far as can be seen from here."""
        return self._reusable and not self._reader.at_eof() and not self._writer.is_closing()

    def close(self) -> None:
        """Close it; whoever reads from it gets an error."""
        self._writer.close()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to one request. A status that is not 200 comes with a body that says more."""
        status, headers = await self._request(path, body)
        text = b"".join([chunk async for chunk in self._body(headers)])
        answer = json.loads(text or b"{}")
        if not isinstance(answer, dict):
            raise ValueError("the answer is not a JSON object")
        if status != 200 and "error" not in answer:
            raise ValueError(f"HTTP status {status}")
        return answer

    async def lines(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the JSON objects, one per line, of an answer that may never end."""
        status, headers = await self._request(path, body)
        begun: list[bytes] = []
        async for chunk in self._body(headers):
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                if line := b"".join([*begun, end]).strip():
                    yield json.loads(line)
                begun.clear()
            begun.append(rest)
        if line := b"".join(begun).strip():
            yield json.loads(line)
        elif status != 200:
            raise ValueError(f"HTTP status {status}")

    async def _request(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, str]]:
        text = json.dumps(body, separators=(",", ":")).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text)
        await self._writer.drain()
        version, _, rest = (await self._line()).partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError("not an HTTP server")
        headers = {}
        while line := await self._line():
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        self._reusable = version == "HTTP/1.1" and headers.get("connection") != "close"
        return int(rest.split(" ", 1)[0]), headers

    async def _line(self) -> str:
        line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the connection was closed")
        return line.decode("latin-1").rstrip("\r\n")

    async def _body(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") == "chunked":
            while size := int((await self._line()).partition(";")[0], 16):
                yield await self._reader.readexactly(size)
                await self._line()
            while await self._line():
                pass  # trailers
        elif "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
        else:
            self._reusable = False
            yield await self._reader.read()
