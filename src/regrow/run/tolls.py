"""What this process has measured of steps and recoveries, for the price of the next one. Decides nothing.

A step costs one look at the clock; whatever is computed from it is computed when a plan is made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from regrow.plan.costs import Costs, speeds
from regrow.rules import Source

_KEPT_STEPS = 64
_WARM_REPLAYS = 2
"""So many replayed steps of a process do not count: it is new, and would be as slow in any other step."""
_ENOUGH = 5
"""Fewer say nothing about a replay: one that is taken for slow is not tried again."""


class Tolls:
    """Used by the thread that trains."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._replays: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._replayed = 0
        self._last_s: float | None = None
        self._fetched: dict[Source, float] = {}

    def completed(self, now_s: float, *, replayed: bool) -> None:
        """A step is complete. It took since the last one was; if there was a recovery between them, nobody knows."""
        self._replayed += replayed
        if self._last_s is not None and not replayed:
            self._steps.append(now_s - self._last_s)
        elif self._last_s is not None and self._replayed > _WARM_REPLAYS:
            self._replays.append(now_s - self._last_s)
        self._last_s = now_s

    def interrupted(self) -> None:
        """A recovery begins."""
        self._last_s = None

    def fetched(self, source: Source, nbytes: float, seconds: float) -> None:
        """So much state was taken from there in so long; the last time counts."""
        if nbytes > 0:
            self._fetched[source] = nbytes / max(seconds, 1e-6)

    def costs(self, hints: Mapping[Source, float | None]) -> Costs:
        """Return all of it. ``hints``: bytes a second that others have seen."""
        return Costs(
            fetched=speeds(self._fetched),
            hinted=speeds(hints),
            step_s=median(self._steps) if self._steps else None,
            replay_s=median(self._replays) if len(self._replays) >= _ENOUGH else None,
        )
