"""Send snapshots in the spans in which no collective is under way, and find out how much fits there.

The sender asks before every piece. While a collective is under way it waits; in an idle span it sends as much as the
span, by the profile of the iterations before, still has room for. Pieces are small and hardly any of them is in the
kernel's hands at a time, so that a collective that comes early is not held up. An update that waits for the end of the
traffic is worse than traffic beside a collective: then everything goes at once. So it does beside a collective that
stands still: it waits for a rank and not for the network, and that rank may wait for what is to be sent here.
"""

from __future__ import annotations

import math
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from regrow.group import Activity, Fabric, Idle, outgoing
from regrow.plan.spans import Frequency, Link, every, remaining_s, share, typical
from regrow.sizes import show_bytes

_PROFILE = 20
"""So many iterations make a profile."""
_WARM_UP = 2
"""So many do not count: they allocate, import and make first contacts."""
_PIECE_S = 0.006
"""How long a piece takes: as long may a collective that comes early be held up, twice at most."""
_LEAST, _MOST = 64 << 10, 4 << 20
_FIRST_BYTES_S = 100e6
_LEAST_BYTES_S = 10e3
"""No network counts as slower: one that takes nothing for a moment is not to be waited for till the end of days."""
_MEASURE_S = 0.02
_LOOK_EVERY_S = 0.05
_STANDS_STILL_S = 1.0
"""A collective that takes so long, and has nothing left to send here, waits for somebody."""
_NEWER = 0.3
_HURRIED = -1
"""Stands for the number of a span where everything goes at once."""


class Pacer:
    """``pace`` is called by the thread that sends, the rest by the one that trains."""

    def __init__(self, fabric: Fabric, look: Callable[[], None], hurry: Callable[[], bool]) -> None:
        """``look`` raises when the generation is over; ``hurry``: whether training waits for the traffic's end."""
        self._fabric = fabric
        self._look = look
        self._hurry = hurry
        self._activity = fabric.activity = Activity()
        self._iterations: deque[list[float]] = deque(maxlen=_PROFILE)
        self._turns = 0
        self.spans_s: tuple[float, ...] | None = None
        """The idle spans of a typical iteration, once there is a profile."""
        self.bytes_s: float | None = None
        """What the network takes in an idle span."""
        self._frequency = Frequency()
        self._load_bytes = 0
        self._share = 1.0
        self._span: tuple[int, int] | None = None
        self._began_s, self._began_bytes = 0.0, 0
        self._sent = 0
        self._left = 0
        self.hurried_bytes = 0
        """How much went without regard to collectives."""

    def resume(self) -> None:
        """A generation begins: collectives of the one before it are over, whatever gloo says."""
        self._activity = self._fabric.activity = Activity()
        self._turns = 0

    def turn(self) -> None:
        """An iteration begins."""
        spans_s = self._activity.turn()
        self._turns += 1
        if self._turns > _WARM_UP:
            self._iterations.append(spans_s)
            self.spans_s = typical(self._iterations)
            if self.spans_s is not None:
                self._share = share(self.spans_s, self._load_bytes, self.link())

    def link(self) -> Link:
        """Return what is known of the network."""
        return Link(bytes_s=self.bytes_s or _FIRST_BYTES_S)

    def proposal(self, state_bytes: int, copies: int) -> int:
        """Return after how many iterations another snapshot should be taken, as far as this rank can tell."""
        self._load_bytes = state_bytes * copies
        if self.spans_s is None or self.bytes_s is None or not copies:
            return self._frequency.every
        return self._frequency.propose(every(self.spans_s, state_bytes, copies, self.link(), most=100))

    def facts(self) -> dict[str, Any]:
        """Return what a report says of the traffic."""
        return {
            "idle_s": None if self.spans_s is None else sum(self.spans_s),
            "bytes_s": self.bytes_s,
            "hurried_bytes": self.hurried_bytes,
        }

    def explain(self, every: int, state_bytes: int) -> str:
        """Return why snapshots are taken so often, for the person who watches."""
        idle_s, bytes_s = sum(self.spans_s or ()), self.bytes_s or math.nan
        return (
            f"snapshots are taken every {every} steps from now on: one is {show_bytes(state_bytes)}, other hosts take "
            f"{show_bytes(bytes_s)}/s, and a step leaves the network idle for {idle_s:.3f} s"
        )

    # sending ---------------------------------------------------------------------------------------------------------

    def pace(self, connection: socket.socket, left: int) -> int:
        """Return how much may be sent now; not before something may."""
        if left > self._left:  # another snapshot, or another host that keeps it
            self._span = None
        self._sent += max(self._left - left, 0)
        while True:
            self._look()
            now_s, unsent = time.monotonic(), outgoing(connection)
            link = self.link()
            piece = min(max(int(link.bytes_s * _PIECE_S), _LEAST), _MOST)
            if self._hurry() or self._stands_still():
                self._measure((self._turns, _HURRIED), now_s, unsent)  # no collective is in its way
                self.hurried_bytes += min(left, piece)
                return self._promise(left, piece)
            idle = self._idle()
            if idle is None:
                self._end_span(now_s, unsent)
                continue
            self._measure((self._turns, idle.span), now_s, unsent)
            room_s = remaining_s(idle.span, idle.elapsed_s, self.spans_s, self._share)
            fitting = piece if math.isinf(room_s) else link.fitting(room_s) - unsent
            allowed = min(fitting, 2 * piece - unsent)
            if allowed >= min(left, _LEAST):
                return self._promise(left, min(allowed, piece))
            if fitting < min(left, _LEAST):  # this span is used up
                self._end_span(now_s, unsent)
                self._activity.wait(_LOOK_EVERY_S)
            else:  # until half a piece is left: every waking takes something from whoever computes on this core
                time.sleep(min(max((unsent - piece / 2) / link.bytes_s, _PIECE_S / 4), _LOOK_EVERY_S))

    def until_room(self, seconds: float) -> None:
        """Wait for an idle span with so much time left, if there are any: collectives need the host's memory, too."""
        while self.spans_s is not None and max(self.spans_s, default=0.0) > 2 * seconds and not self._hurry():
            self._look()
            if self._stands_still():
                return
            idle = self._idle()
            if idle is not None:
                if remaining_s(idle.span, idle.elapsed_s, self.spans_s, 1.0) > seconds:
                    return
                self._activity.wait(_LOOK_EVERY_S)

    def _stands_still(self) -> bool:
        return self._activity.busy_s() > _STANDS_STILL_S and self._fabric.unsent() <= _LEAST

    def _idle(self) -> Idle | None:
        """Return whether the network is idle; if not, after a while."""
        idle = self._activity.idle()
        if idle is None:
            self._activity.wait(_LOOK_EVERY_S)
        elif self._fabric.unsent() > _LEAST:  # over here, but not yet where it goes to
            time.sleep(_PIECE_S / 4)
            return None
        return idle

    def _promise(self, left: int, most: int) -> int:
        self._left = left
        return min(left, most)

    def _measure(self, span: tuple[int, int], now_s: float, unsent: int) -> None:
        """Learn from what has left this host since the span was first used, as soon as that is enough to learn from."""
        delivered = self._sent - unsent
        if span == self._span:
            if now_s - self._began_s < _MEASURE_S or delivered - self._began_bytes < _LEAST:
                return
            self._learn(delivered - self._began_bytes, now_s - self._began_s)
        self._span, self._began_s, self._began_bytes = span, now_s, delivered

    def _end_span(self, now_s: float, unsent: int) -> None:
        """Nothing more goes in this span. If not all that was sent has left, the network is slower than was thought."""
        if self._span is not None and unsent and now_s - self._began_s >= _MEASURE_S:
            self._learn(self._sent - unsent - self._began_bytes, now_s - self._began_s)
        self._span = None

    def _learn(self, nbytes: int, seconds: float) -> None:
        found = nbytes / seconds
        if self.bytes_s is not None or not nbytes:  # nothing at all tells only that it is slower
            found = (1 - _NEWER) * self.link().bytes_s + _NEWER * found
        self.bytes_s = max(found, _LEAST_BYTES_S)
