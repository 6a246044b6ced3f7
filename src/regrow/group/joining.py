"""Connect groups at a generation without being caught in it, and let go of old ones without waiting for them.

The blocking halves (gloo's constructor and destructor) run in helper threads; the caller only ever polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from regrow.errors import PeerLost, Superseded
from regrow.group import helpers
from regrow.group.healing import HealingGroup
from regrow.group.network import Inner, Network

POLL_S = 0.002


def join(
    network: Network, groups: Sequence[HealingGroup], *, superseded: Callable[[], bool], deadline: float
) -> list[Inner]:
    """Connect the groups one by one and return what came of it, in their order.

    Raises ``Superseded``, ``PeerLost`` or ``TimeoutError``, and has then ended the network: what still connects in the
    helper thread is called off, and dropped there if it comes through after all.
    """
    wanted = [(group.meeting, group.rank(), group.size(), group.timeout) for group in groups]
    generation = network.generation

    def connect() -> list[Inner]:
        return [network.connect(name, rank, size, limit, deadline) for name, rank, size, limit in wanted]

    errand = helpers.Errand(f"regrow-connect-{generation}", connect)
    failure: Exception | None = None
    while failure is None and not errand.done.wait(POLL_S):
        if superseded():
            failure = Superseded(generation, generation + 1)
        elif network.ended.is_set():
            failure = PeerLost(f"generation {generation} was aborted while it connected", generation=generation)
        elif time.monotonic() > deadline:
            failure = TimeoutError(f"generation {generation}: peers did not come in time")
    if failure is None and errand.result is not None:
        return errand.result
    if failure is None:
        failure = PeerLost(f"generation {generation}: {errand.error}", generation=generation)
        if superseded():
            failure = Superseded(generation, generation + 1)
        elif time.monotonic() > deadline:
            failure = TimeoutError(f"generation {generation}: {errand.error}")
    network.end()
    drop(errand.abandon(), network)
    raise failure


def detached(groups: Sequence[HealingGroup]) -> list[Inner]:
    """Take the inner groups from their owners. The list must be their only holder: whoever lets go last destroys."""
    return [inner for group in groups if (inner := group.detach()) is not None]


def drop(things: list[Inner], network: Network | None = None) -> None:
    """Destroy old groups (and their network) in another thread: a destructor of gloo waits for its workers."""

    def run(box: list[Inner]) -> None:
        if network is not None:
            network.close()
        box.clear()

    helpers.start("regrow-drop", run, things)
