"""What a person gets to see of checkpoints on storage: that they are made, and that one takes long. Rank 0 speaks."""

from __future__ import annotations

import math
from collections.abc import Callable

from regrow.ids import Step
from regrow.sizes import show_bytes

_EVERY_S = 10.0
_SLOW_S = 60.0
"""A checkpoint that takes so long is told of, even if storage says nothing at all."""


class Progress:
    """Speaks now and then, however many checkpoints there are. ``now_s`` is whatever clock the caller has."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        """``say``: ``None`` on a rank that keeps silent."""
        self._say = say
        self._told_s = -math.inf

    def committed(self, now_s: float, step: Step, seconds: float, why: str) -> None:
        """One is complete. ``why``: how often they come, and from which measurements."""
        if self._say is not None and now_s > self._told_s + _EVERY_S:
            self._told_s = now_s
            self._say(f"checkpoint of step {step} committed in {seconds:.2f} s; {why}")

    def written(self, now_s: float, step: Step, done: int, total: int) -> None:
        """So much of this rank's share is on its way to storage."""
        if self._say is not None and math.isfinite(self._told_s) and now_s > self._told_s + _EVERY_S:
            self._told_s = now_s
            self._say(f"checkpoint of step {step}: {show_bytes(done)} of {show_bytes(total)} written")

    def under_way(self, now_s: float, began_s: float, step: Step, newest: Step | None, where: str) -> None:
        """Training does not wait for storage; but whoever counts on checkpoints must hear that there are none."""
        if self._say is None or now_s < max(began_s, self._told_s) + _SLOW_S:
            return
        self._told_s = now_s
        there = "there is none yet" if newest is None else f"the newest is of step {newest}"
        self._say(
            f"the checkpoint of step {step} is not complete after {now_s - began_s:.0f} s: {where} takes it slowly, "
            f"here or on another rank; {there}"
        )
