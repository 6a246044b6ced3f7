"""When this process's collectives are under way, and how long the network is idle between them. Decides nothing.

Groups tell of each collective as it is issued; gloo tells when it is over, in a thread of its own. Whoever wants to
use the network meanwhile asks whether it is idle, and since when. An iteration's idle spans are counted from its
beginning: a script does the same collectives in the same order at each step, so the number of a span says how long it
will be.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from regrow.group.work import LiveWork


class Idle(NamedTuple):
    """The network is idle: in which span of this iteration, and for how long already."""

    span: int
    elapsed_s: float


class Activity:
    """The collectives of one generation: an operation that gloo has forgotten is not waited for in the next."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._under_way = 0
        self._idle_since_s = self._busy_since_s = clock()
        self._spans_s: list[float] = []

    def watch(self, work: Any, handle: Any) -> None:
        """A collective was issued; ``handle`` is what its caller got."""
        if not isinstance(handle, LiveWork):
            return  # it is over already
        with self._changed:
            if self._under_way == 0:
                self._busy_since_s = self._clock()
                self._spans_s.append(self._busy_since_s - self._idle_since_s)
            self._under_way += 1
        try:
            work.get_future().add_done_callback(self._over)
        except RuntimeError:  # gloo's reduce_scatter has none, and does its last part when it is waited for
            handle.waited = self._over

    def _over(self, _: Any = None) -> None:
        with self._changed:
            self._under_way -= 1
            if self._under_way == 0:
                self._idle_since_s = self._clock()
                self._changed.notify_all()

    def turn(self) -> list[float]:
        """An iteration begins: return the idle spans of the one before it."""
        with self._changed:
            if self._under_way == 0:
                now_s = self._clock()
                self._spans_s.append(now_s - self._idle_since_s)
                self._idle_since_s = now_s
            spans_s, self._spans_s = self._spans_s, []
            self._changed.notify_all()
        return spans_s

    def idle(self) -> Idle | None:
        """Return whether the network is idle right now."""
        with self._changed:
            if self._under_way:
                return None
            return Idle(len(self._spans_s), self._clock() - self._idle_since_s)

    def busy_s(self) -> float:
        """Return for how long there was always some collective under way; 0 if there is none now."""
        with self._changed:
            return self._clock() - self._busy_since_s if self._under_way else 0.0

    def wait(self, timeout_s: float) -> None:
        """Return when the network falls idle, another iteration begins, or the time is over."""
        with self._changed:
            self._changed.wait(timeout_s)
