"""What a run leaves in a store that outlives it: cleared away by the last host, or by the first of the next run.

A store that an agent hosts ends with the agent, and needs none of this.
"""

from __future__ import annotations

import asyncio
import json

from regrow.agent.leader import HOSTS, LEADER_KEY, WORLD_KEY
from regrow.agent.store import ControlStore, Lease, LeaseLost
from regrow.agent.world import World

_POLL_S = 0.2
RUN_KEY = "run"
STARTING = b'{"starting": true}'


async def begun(store: ControlStore) -> bool:
    """Whether a run has begun."""
    entry = await store.get(RUN_KEY)
    return entry is not None and "birth" in json.loads(entry.value)


async def forget_the_last(store: ControlStore, ttl_s: float) -> None:
    """Wait until no run of this name is just ending, or has ended without a chance to clear up."""
    while True:
        await clear(store, ttl_s)
        entry = await store.get(WORLD_KEY)
        if entry is None or not World.loads(entry.value).over:
            return
        await asyncio.sleep(_POLL_S)


async def clear(store: ControlStore, ttl_s: float) -> None:
    """Delete what a run without hosts has left, unless somebody else does; its name is free when that is done."""
    entry = await store.get(RUN_KEY)
    if entry is None or "birth" not in json.loads(entry.value) or await store.keys(HOSTS):
        return
    lease = await store.grant(ttl_s)
    if await store.compare_and_set(RUN_KEY, entry.version, b'{"clearing": true}', lease) is not None:
        await wipe(store, lease)
        await store.delete(LEADER_KEY)
    await lease.revoke()  # and with it goes the last key


async def wipe(store: ControlStore, lease: Lease | None) -> None:
    """Delete all but hosts and the leader, and what says that we do so; only while our lease lasts."""
    kept = {HOSTS.rstrip("/"), LEADER_KEY, RUN_KEY}
    for part in sorted({key.partition("/")[0] for key in await store.keys("")} - kept):
        if lease is not None and not await lease.keep():
            raise LeaseLost("the lease is over")
        await store.delete(part, prefix=True)
