"""Measure in passing what a pipeline's steps cost: seconds of computing, bytes to each rank; and how fast messages are.

`regrow profile` makes a profile of it. Nothing here decides anything, and nothing of it costs a message per step: two
looks at the clock, and what the transport has added up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from statistics import median
from typing import Any

from regrow.courier import Courier
from regrow.errors import PeerLost

_WARM_STEPS = 2
"""So many steps of a process do not count: they allocate, import and make first contacts."""
_KEPT_STEPS = 512
_TELL_FROM = 10
_TELL_EVERY_S = 30.0

_PART_BYTES = 1 << 20
_PARTS = 4


class Meter:
    """The live, complete steps of one process. Not the interrupted ones, nor those that were replayed."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._waited_s = 0.0
        self._warm = 0
        self._steps = 0
        self._busy: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._sent: dict[int, int] = {}
        self._told_s: float | None = None

    def begin(self, now_s: float, waited_s: float) -> None:
        """A step begins, perhaps once more."""
        self._began_s, self._waited_s = now_s, waited_s

    def complete(self, now_s: float, waited_s: float, sent: Mapping[int, int]) -> None:
        """It is complete; ``waited_s`` is the total of all waiting so far, ``sent`` the bytes to each rank in it."""
        if self._warm < _WARM_STEPS:
            self._warm += 1
            return
        self._steps += 1
        self._busy.append(now_s - self._began_s - (waited_s - self._waited_s))
        for peer, nbytes in sent.items():
            self._sent[peer] = self._sent.get(peer, 0) + nbytes

    def due(self, now_s: float) -> bool:
        """Whether it is time to tell: as soon as there is something to tell, and then now and then."""
        if self._steps < _TELL_FROM or (self._told_s is not None and now_s < self._told_s + _TELL_EVERY_S):
            return False
        self._told_s = now_s
        return True

    def totals(self) -> dict[str, Any]:
        """Return the steps measured so far, and what one of them takes: the median time, the average bytes."""
        return {
            "steps": self._steps,
            "busy_s": median(self._busy) if self._busy else None,
            "sent_bytes": {str(peer): nbytes / self._steps for peer, nbytes in self._sent.items()},
        }


def link_rate(courier: Courier, rank: int, world: int, timeout: timedelta) -> float | None:
    """Return at how many bytes a second the rank before this one sends to it, while all ranks do so; in the set-up.

    The first part is not timed: it warms the connection, and some of it may lie here before anyone reads. ``None`` if
    a rank is lost meanwhile, which the agents see, too: as anywhere in the set-up, they start all ranks again.
    """
    part = memoryview(bytes(_PART_BYTES))
    before, after = (rank - 1) % world, (rank + 1) % world
    try:
        for _ in range(_PARTS):
            courier.send(after, "rate", part, stays=True)
        courier.take(before, "rate", timeout)
        began_s = time.monotonic()
        for _ in range(_PARTS - 1):
            courier.take(before, "rate", timeout)
    except PeerLost:
        return None
    return (_PARTS - 1) * _PART_BYTES / max(time.monotonic() - began_s, 1e-6)
