"""The store in an etcd cluster: no agent hosts it, so any agent may be lost, and any one of three members.

Over etcd's JSON gateway, with nothing but the standard library. Versions are etcd's revisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from regrow.agent.etcd_api import COMPACTED, NOT_FOUND, Etcd, Refused, b64
from regrow.agent.etcd_commit import Outcome, Writer
from regrow.agent.etcd_values import Compacted, Cut, Layout, span
from regrow.agent.store import Change, Entry, Lease, LeaseLost, StoreLost


class EtcdLease:
    """A ``Lease`` of etcd, which counts whole seconds: what was asked for is rounded up, to two at least by default."""

    def __init__(self, store: EtcdStore, etcd: Etcd, number: int, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.number = number
        self._store = store
        self._etcd = etcd

    async def keep(self) -> bool:
        """See ``Lease``."""
        try:
            answer = await self._etcd.call("lease/keepalive", {"ID": self.number})
        except Refused as error:
            if error.code != NOT_FOUND:
                raise _explained(error) from None
            return False
        return int(answer.get("TTL", 0)) > 0

    async def revoke(self) -> None:
        """See ``Lease``."""
        await self._store.revoke(self.number)


class EtcdStore:
    """A ``ControlStore`` under ``prefix``. Any wait for etcd ends after ``timeout_s`` with ``StoreLost``."""

    def __init__(self, endpoints: Sequence[tuple[str, int]], prefix: str, timeout_s: float) -> None:
        self._etcd = Etcd(endpoints, timeout_s)
        self._layout = Layout(self._etcd, prefix)
        self._writer = Writer(self._etcd, self._layout)

    @property
    def local_address(self) -> str:
        """The address of this host that etcd was reached from."""
        return self._etcd.local_address

    async def close(self) -> None:
        """Delete what was kept for this client only, and if nothing else is left, what lost clients have left."""
        others = [self._layout.parts(""), self._layout.writer("")]
        body = {
            "compare": [{**span(self._layout.key("")), "target": "VERSION", "version": 0}],  # not one key is there
            "success": [{"request_delete_range": span(start)} for start in others],
            "failure": [{"request_delete_range": self._writer.leftovers()}],
        }
        with contextlib.suppress(StoreLost, Refused):
            await self._etcd.call("kv/txn", body)
        self.disconnect()

    def disconnect(self) -> None:
        """End all that goes on; whoever waits gets ``StoreLost``."""
        self._etcd.close()

    async def get(self, key: str) -> Entry | None:
        """See ``ControlStore``."""
        while True:
            answer = await self._read({"key": b64(self._layout.key(key))})
            if not (found := answer.get("kvs")):
                return None
            with contextlib.suppress(Compacted):
                change = await self._layout.change(found[0], int(answer["header"]["revision"]))
                assert change.value is not None
                return Entry(change.value, change.version)

    async def put(self, key: str, value: bytes, lease: Lease | None = None) -> int:
        """See ``ControlStore``."""
        while (version := await self._write(key, value, [], lease)) is None:
            pass  # only by its parts being swept away can a write without a condition fail
        return version

    async def compare_and_set(self, key: str, version: int, value: bytes, lease: Lease | None = None) -> int | None:
        """See ``ControlStore``."""
        unchanged = {"key": b64(self._layout.key(key)), "target": "MOD", "mod_revision": version}
        return await self._write(key, value, [unchanged], lease)

    async def _write(self, key: str, value: bytes, compare: list[dict[str, Any]], lease: Lease | None) -> int | None:
        hangs_on = {"lease": _number(lease)}
        while True:
            cut = self._layout.cut(key, value)
            for name, piece in cut.parts:
                await self._refusable("kv/put", {"key": b64(name), "value": b64(piece), **hangs_on})
            written = {"key": b64(self._layout.key(key)), "value": b64(cut.head), **hangs_on}
            operations = [{"request_put": written}, *({"request_delete_range": others} for others in cut.others)]
            # whoever replaces the value sweeps our parts away if they come before it: then also the first
            intact = [{"key": b64(name), "target": "VERSION", "result": "GREATER"} for name, _ in cut.parts[:1]]
            outcome = await self._commit([*compare, *intact], operations)
            if outcome.version is not None or not cut.parts:
                return outcome.version
            if await self._discard(cut):
                return None

    async def _discard(self, cut: Cut) -> bool:
        """Delete the parts of a value that was not written; False if they were gone already."""
        first, last = cut.parts[0][0], cut.parts[-1][0]
        answer = await self._refusable("kv/deleterange", span(first, last + b"\0"))
        return int(answer.get("deleted", 0)) == len(cut.parts)

    async def delete(self, key: str, *, prefix: bool = False) -> int:
        """See ``ControlStore``."""
        at = self._layout.key(key)
        what = span(at) if prefix else {"key": b64(at)}
        parts = span(self._layout.parts(key) + (b"" if prefix else b"\0"))
        outcome = await self._commit([], [{"request_delete_range": what}, {"request_delete_range": parts}])
        if outcome.answers is not None:
            return int(outcome.answers[0]["response_delete_range"].get("deleted", 0))
        assert outcome.version is not None
        before = await self._read({**what, "count_only": True, "revision": outcome.version - 1})
        return int(before.get("count", 0))

    async def keys(self, prefix: str) -> list[str]:
        """See ``ControlStore``."""
        return await self._layout.keys(prefix)

    async def grant(self, ttl_s: float) -> EtcdLease:
        """See ``ControlStore``."""
        if ttl_s <= 0:
            raise ValueError(f"a lease needs a positive time to live, got {ttl_s}")
        # one whose answer is lost expires by itself
        answer = await self._refusable("lease/grant", {"TTL": math.ceil(ttl_s)})
        return EtcdLease(self, self._etcd, int(answer["ID"]), float(answer["TTL"]))

    async def revoke(self, number: int) -> None:
        """See ``ControlStore``."""
        try:
            await self._etcd.call("lease/revoke", {"ID": number})
        except Refused as error:
            if error.code != NOT_FOUND:
                raise _explained(error) from None

    async def watch(self, prefix: str) -> AsyncGenerator[Change, None]:
        """See ``ControlStore``."""
        revision, changes = await self._layout.listing(prefix)
        known: set[str] = set()
        while True:
            for change in changes:
                _note(change, known)
                yield change
            try:
                async with contextlib.aclosing(self._follow(prefix, revision)) as following:
                    async for revision, batch in following:  # noqa: B007  where a new listing would go on from
                        for change in batch:
                            _note(change, known)
                            yield change
            except Compacted:
                since = revision
                revision, there = await self._layout.listing(prefix)
                missing = sorted(known - {change.key for change in there})
                changes = [Change(key, None, revision) for key in missing]
                changes += [change for change in there if change.version > since]

    async def _follow(self, prefix: str, revision: int) -> AsyncGenerator[tuple[int, list[Change]], None]:
        """Yield what happened after ``revision``, with the revision that it leads to, from whichever member tells."""
        loop = asyncio.get_running_loop()
        silent_since: float | None = None
        while True:
            create = {**span(self._layout.key(prefix)), "start_revision": revision + 1, "fragment": True}
            events: list[dict[str, Any]] = []
            try:
                async with contextlib.aclosing(self._etcd.stream("watch", {"create_request": create})) as stream:
                    async for told in stream:
                        if told.get("canceled"):
                            raise _canceled(told)
                        if not told.get("created"):  # which a member says also if it is alone
                            silent_since = None
                        events += told.get("events", [])
                        if events and not told.get("fragment"):
                            batch = [await self._change(event) for event in events]
                            events = []
                            revision = max(change.version for change in batch)
                            yield revision, batch
            except Refused as error:
                raise (Compacted() if error.code == COMPACTED else _explained(error)) from None
            except OSError as error:
                now = loop.time()
                silent_since = now if silent_since is None else silent_since
                if now - silent_since > self._etcd.timeout_s:
                    raise self._etcd.lost(str(error)) from None
                await asyncio.sleep(self._etcd.attempt_s / 4 if now > silent_since else 0)

    async def _change(self, event: dict[str, Any]) -> Change:
        if event.get("type") == "DELETE":
            return self._layout.gone(event["kv"])
        return await self._layout.change(event["kv"], int(event["kv"]["mod_revision"]))

    # ------------------------------------------------------------------ what etcd refuses

    async def _commit(self, compare: list[dict[str, Any]], operations: list[dict[str, Any]]) -> Outcome:
        try:
            return await self._writer.commit(compare, operations)
        except Refused as error:
            raise _explained(error) from None

    async def _refusable(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._etcd.call(path, body)
        except Refused as error:
            raise _explained(error) from None

    async def _read(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._refusable("kv/range", body)


def _note(change: Change, known: set[str]) -> None:
    (known.discard if change.value is None else known.add)(change.key)


def _canceled(told: dict[str, Any]) -> Exception:
    if "compact_revision" in told:
        return Compacted()
    return ConnectionError(f"etcd ended the watch: {told.get('cancel_reason', 'no reason given')}")


def _explained(error: Refused) -> Exception:
    if error.code == NOT_FOUND:  # of all that is asked for, only a lease can be missing in this way
        return LeaseLost("the lease is over")
    return StoreLost(f"etcd refuses: {error}")


def _number(lease: Lease | None) -> int:
    if lease is None:
        return 0
    if not isinstance(lease, EtcdLease):
        raise LeaseLost("the lease is not of this store")
    return lease.number
