"""How the store's keys and values lie in etcd, which takes no more than 1.5 MB at once.

Under a run's prefix, ``k/<key>`` holds a value, or, if it is large, how many parts it has; the parts lie under
``p/<key>``, and ``w/`` is for the writers (see ``etcd_commit``). Parts are written before the value that names them,
under a name that no other write has, and go in the transaction in which the value that names them is replaced.
"""

from __future__ import annotations

import contextlib
import json
import uuid
import zlib
from dataclasses import dataclass
from typing import Any

from regrow.agent.etcd_api import COMPACTED, Etcd, Refused, b64, unb64
from regrow.agent.store import Change, StoreLost

_WHOLE, _SPLIT = b"\0", b"\1"
_INLINE_BYTES = 64 << 10
_PART_BYTES = 1 << 20
# gRPC takes answers of up to 4 MB
_PARTS_AT_ONCE = 3
_VALUES_AT_ONCE = 32
_KEYS_AT_ONCE = 2000


class Compacted(Exception):
    """etcd does not know any more what was there at that revision."""


def after(prefix: bytes) -> bytes:
    """Return the first key behind all those that begin with ``prefix`` (which does not end with a byte 255)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def span(start: bytes, end: bytes | None = None) -> dict[str, Any]:
    """Return etcd's words for the keys from ``start`` up to ``end``, or for all that begin with ``start``."""
    return {"key": b64(start), "range_end": b64(after(start) if end is None else end)}


@dataclass(frozen=True)
class Cut:
    """A value as it is to be written: what goes to the key, the parts before it, and where they lie."""

    head: bytes
    parts: tuple[tuple[bytes, bytes], ...]
    """Names and contents."""
    others: tuple[dict[str, Any], ...]
    """The spans of parts that older values of the key have left."""


class Layout:
    """The keys of one run."""

    def __init__(self, etcd: Etcd, prefix: str) -> None:
        self._etcd = etcd
        self._root = prefix.encode()

    def key(self, key: str) -> bytes:
        """Where a key's value lies."""
        if "\0" in key:
            raise ValueError(f"a key must not hold a NUL: {key!r}")
        return self._root + b"k/" + key.encode()

    def parts(self, key: str) -> bytes:
        """Where the parts of all keys lie that begin with ``key``."""
        return self._root + b"p/" + key.encode()

    def writer(self, name: str) -> bytes:
        """Where a writer keeps its own."""
        return self._root + b"w/" + name.encode()

    def cut(self, key: str, value: bytes) -> Cut:
        """Return what to write for a value."""
        own = self.parts(key) + b"\0"
        if len(value) <= _INLINE_BYTES:
            return Cut(_WHOLE + value, (), (span(own),))
        name = uuid.uuid4().hex
        mine = own + name.encode() + b"/"
        pieces = [value[start : start + _PART_BYTES] for start in range(0, len(value), _PART_BYTES)]
        about = {"name": name, "parts": len(pieces), "crc32": zlib.crc32(value)}
        parts = tuple((mine + b"%08d" % number, piece) for number, piece in enumerate(pieces))
        others = (span(own, mine), span(after(mine), after(own)))
        return Cut(_SPLIT + json.dumps(about).encode(), parts, others)

    async def value(self, key: str, head: bytes, revision: int) -> bytes:
        """Return the value that was written as ``head`` and is still there at ``revision``, else ``Compacted``."""
        if head[:1] == _WHOLE:
            return head[1:]
        about = json.loads(head[1:])
        mine = self.parts(key) + b"\0" + about["name"].encode() + b"/"
        _, found = await self._pages(mine, revision, _PARTS_AT_ONCE)
        value = b"".join(unb64(kv.get("value", "")) for kv in found)
        if len(found) != about["parts"] or zlib.crc32(value) != about["crc32"]:
            raise StoreLost(f"etcd holds {key!r} damaged: {len(found)} of {about['parts']} parts, or not as written")
        return value

    async def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with ``prefix``."""
        while True:
            with contextlib.suppress(Compacted):
                _, found = await self._pages(self.key(prefix), 0, _KEYS_AT_ONCE, keys_only=True)
                return [self._name(kv) for kv in found]

    async def listing(self, prefix: str) -> tuple[int, list[Change]]:
        """Return all keys that begin with ``prefix`` as they were at one revision, oldest first, and that revision."""
        while True:
            try:
                revision, found = await self._pages(self.key(prefix), 0, _VALUES_AT_ONCE)
                changes = [await self.change(kv, revision) for kv in found]
            except Compacted:
                continue
            return revision, sorted(changes, key=lambda change: change.version)

    async def change(self, kv: dict[str, Any], revision: int) -> Change:
        """Return what etcd tells of a key, with its value as it is at ``revision``."""
        key = self._name(kv)
        return Change(key, await self.value(key, unb64(kv["value"]), revision), int(kv["mod_revision"]))

    def gone(self, kv: dict[str, Any]) -> Change:
        """Return the change that etcd tells of as a deletion."""
        return Change(self._name(kv), None, int(kv["mod_revision"]))

    def _name(self, kv: dict[str, Any]) -> str:
        return unb64(kv["key"])[len(self._root) + len(b"k/") :].decode()

    async def _pages(self, start: bytes, revision: int, limit: int, **more: Any) -> tuple[int, list[dict[str, Any]]]:
        """Read a span piece by piece, all of it as it was at one revision (0: now). ``Compacted`` if that is gone."""
        end, found = after(start), list[dict[str, Any]]()
        while True:
            body = {**span(start, end), "limit": limit, "revision": revision, **more}
            try:
                answer = await self._etcd.call("kv/range", body)
            except Refused as error:
                if error.code == COMPACTED:
                    raise Compacted from None
                raise StoreLost(f"etcd refuses to read: {error}") from None
            revision = revision or int(answer["header"]["revision"])
            found += answer.get("kvs", [])
            if not answer.get("more"):
                return revision, found
            start = unb64(found[-1]["key"]) + b"\0"
