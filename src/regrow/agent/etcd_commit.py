"""Transactions that happen exactly once, though requests may be lost, repeated, or late.

A member that hangs and comes back may carry out a request that another one has answered long ago; a connection that
breaks leaves open whether its last request was carried out. So each transaction also writes to a key of its writer, on
condition that this key was not written since, whether or not the transaction's own conditions hold. Then a repetition
does nothing but to find there how it ended.
"""

from __future__ import annotations

import itertools
import uuid
from dataclasses import dataclass
from typing import Any

from regrow.agent.etcd_api import Etcd, b64, unb64
from regrow.agent.etcd_values import Layout, span
from regrow.agent.store import StoreLost

_DONE, _REFUSED = b"done", b"refused"


@dataclass
class _Slot:
    """A key that one transaction at a time writes to; etcd counts how often."""

    key: bytes
    writes: int = 0


@dataclass(frozen=True)
class Outcome:
    """``version`` is the revision that it made, None if its conditions did not hold."""

    version: int | None
    answers: list[dict[str, Any]] | None = None
    """What etcd answered to each operation; None if that answer was lost."""


class Writer:
    """Makes the transactions of one store."""

    def __init__(self, etcd: Etcd, layout: Layout) -> None:
        self._etcd = etcd
        self._own = layout.writer(uuid.uuid4().hex) + b"/"
        self._numbers = itertools.count()
        self._free: list[_Slot] = []

    async def commit(self, compare: list[dict[str, Any]], operations: list[dict[str, Any]]) -> Outcome:
        """Carry out the operations if all comparisons hold. ``Refused`` by etcd itself: then nothing was done."""
        slot = self._free.pop() if self._free else _Slot(self._own + b"%d" % next(self._numbers))
        unwritten = {"key": b64(slot.key), "target": "VERSION", "version": slot.writes}
        body = {
            "compare": [unwritten, *compare],
            "success": [*operations, _put(slot, _DONE)],
            "failure": [
                {
                    "request_txn": {
                        "compare": [unwritten],
                        "success": [_put(slot, _REFUSED)],
                        "failure": [{"request_range": {"key": b64(slot.key)}}],
                    }
                }
            ],
        }
        answer = await self._etcd.call("kv/txn", body)  # if this fails, the slot is not used again
        outcome = self._outcome(answer, slot)
        slot.writes += 1
        self._free.append(slot)
        return outcome

    def _outcome(self, answer: dict[str, Any], slot: _Slot) -> Outcome:
        if answer.get("succeeded"):
            return Outcome(int(answer["header"]["revision"]), answer["responses"])
        inner = answer["responses"][0]["response_txn"]
        if inner.get("succeeded"):
            return Outcome(None)
        before = inner["responses"][0]["response_range"].get("kvs")
        if not before or int(before[0]["version"]) != slot.writes + 1:
            raise StoreLost("somebody else has deleted this run's keys from etcd")
        return Outcome(int(before[0]["mod_revision"]) if unb64(before[0]["value"]) == _DONE else None)

    def leftovers(self) -> dict[str, Any]:
        """Return the span of what it has written; nothing may be committed after that was deleted."""
        self._free.clear()
        return span(self._own)


def _put(slot: _Slot, value: bytes) -> dict[str, Any]:
    return {"request_put": {"key": b64(slot.key), "value": b64(value)}}
