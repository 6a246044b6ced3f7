"""A host's right to hold ranks: a lease in the store, renewed, and how long this host may rely on it.

The store gives a silent host's ranks to others when the lease expires there, a lease's length after the last renewal
*came*. This host must have killed its workers by then, so it counts from when that renewal was *sent*, and a little
less. Nothing has to be heard from anybody for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from regrow.agent.store import ControlStore, Lease, StoreLost

_RENEWALS = 3
"""How often a lease is renewed in its time: one renewal may be lost without harm."""
_SHARE = 0.9
"""Which part of a lease is relied on: the rest is for killing."""


class Tenure:
    """``over`` is done, with the reason, as soon as this host must hold no rank any more."""

    def __init__(self, lease: Lease | None, sent_t: float) -> None:
        self.lease = lease
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tell: Callable[[float], None] = lambda until_t: None
        self._until = math.inf
        self._renewing: asyncio.Task[None] | None = None
        if lease is not None:
            self._until = sent_t + _SHARE * lease.ttl_s
            self._renewing = asyncio.create_task(self._renew(lease))

    @staticmethod
    async def begin(store: ControlStore, ttl_s: float) -> Tenure:
        """Take a lease. ``StoreLost`` if the store cannot be reached."""
        sent_t = time.monotonic()
        return Tenure(await store.grant(ttl_s), sent_t)

    @staticmethod
    def unlimited() -> Tenure:
        """For the host that the store itself lives on: where that ends, everything does."""
        return Tenure(None, 0.0)

    def tell(self, until: Callable[[float], None]) -> None:
        """Let somebody know until when it lasts, now and whenever it is renewed."""
        self._tell = until
        until(self._until)

    @property
    def valid(self) -> bool:
        """Whether ranks may be held at this very moment, also if this process was stopped until now."""
        return not self.over.done() and time.monotonic() < self._until

    async def _renew(self, lease: Lease) -> None:
        try:
            self.end(await self._renew_until_lost(lease))
        except StoreLost as error:
            self.end(str(error))

    async def _renew_until_lost(self, lease: Lease) -> str:
        while True:
            await asyncio.sleep(lease.ttl_s / _RENEWALS)
            sent_t = time.monotonic()
            if sent_t >= self._until:
                return f"this host stood still for more than its lease of {lease.ttl_s:g} s"
            try:
                async with asyncio.timeout(self._until - sent_t):
                    kept = await lease.keep()
            except TimeoutError:
                return f"the store did not answer for nearly {lease.ttl_s:g} s"
            if not kept:
                return "its lease has expired"
            self._until = sent_t + _SHARE * lease.ttl_s
            self._tell(self._until)

    def end(self, why: str) -> None:
        """Let it be over."""
        if not self.over.done():
            self.over.set_result(why)

    async def close(self) -> None:
        """Give it up: the host's keys vanish at once, if the store can be reached."""
        if self._renewing is None or self.lease is None:
            return
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        if not self.over.done():
            self.end("given up")
            with contextlib.suppress(StoreLost, TimeoutError):  # then it expires by itself
                async with asyncio.timeout(self.lease.ttl_s):
                    await self.lease.revoke()
