"""What a checkpoint costs the training, measured from the durations of steps. Pure: no clock of its own.

Steps beside which a checkpoint is under way are *busy*, the others *quiet*. The quiet ones of the recent past give the
*baseline*; a checkpoint costs what the busy steps of its interval take beyond it. Quiet steps count as the baseline,
whatever they took: where they are slow, it is for some other reason, and fewer checkpoints would not help.

Nothing is thrown by a single odd step (a recovery, an evaluation): quiet ones far from the median are not used, busy
ones are capped, and of several intervals the cheapest and the dearest do not count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low

WARM_UP = 5
"""Steps at the start of a run that count for nothing: memory is allocated, kernels are chosen."""

_RECENT = 512
"""Steps that are the recent past."""
_INTERVALS = 16
"""Intervals that are the recent past, if they have more steps than that."""
_ENOUGH = 5
"""Quiet steps without which there is no baseline."""
_KEPT = 128
"""Quiet steps that are kept however long ago they were."""
_ODD = 5.0
"""A quiet step is odd if it is so many deviations above the median, a busy one if it is so many times as long as the
longest of its interval usually is."""
_RARE = 0.05
"""If more quiet steps than this part of them are odd, they are not odd: every tenth step does something more."""


@dataclass(frozen=True)
class _Interval:
    steps: int
    busy: int
    longest_s: float
    cost_s: float


class Overhead:
    """Measures, interval by interval, what the checkpoint in it costs.

    If a checkpoint is always under way there are no quiet steps. The baseline then stays what it was, and does not come
    to include what it is there to measure. Only if even busy steps are faster for long, it must be too high, and
    follows them.
    """

    def __init__(self) -> None:
        self._taken = 0
        self._steps = 0
        """Of this interval; the busy ones among them are in ``_current``."""
        self._current: list[float] = []
        self._quiet: deque[tuple[int, float]] = deque()
        self._since_quiet: deque[float] = deque(maxlen=_RECENT)
        self._usual: list[float] = []
        self._intervals: deque[_Interval] = deque()
        self.baseline_s: float | None = None
        """How long a quiet step takes, as of the end of the last interval."""
        self.cost_s: float | None = None
        """What a checkpoint costs; ``None`` until two were measured, since of one alone nobody knows whether it is odd.
        It outlives ``forget``, until there is a new one."""
        self.noise_s = math.inf
        """How far that may be off: one standard deviation."""

    def step(self, duration_s: float, *, busy: bool, excluded: bool = False) -> None:
        """Take in a step. One that is ``excluded`` is known to be out of the ordinary, and counts for nothing."""
        self._taken += 1
        if excluded or self._taken <= WARM_UP:
            return
        self._steps += 1
        if busy:
            self._current.append(duration_s)
            self._since_quiet.append(duration_s)
        else:
            self._quiet.append((self._taken, duration_s))
            self._since_quiet.clear()

    def turn(self) -> None:
        """End an interval: a checkpoint begins, the one before is complete."""
        steps, current = self._steps, self._current
        self._steps, self._current = 0, []
        self._find_baseline()
        if self.baseline_s is None or not current:  # without a checkpoint, it tells nothing of what one costs
            return
        self._intervals.append(self._weigh(steps, current, self.baseline_s))
        while self._measured_for(self._intervals, but=1) >= 1:
            self._intervals.popleft()
        if len(self._intervals) >= 2:
            self._estimate(self._intervals)

    def forget(self) -> None:
        """Begin to measure anew; the baseline stays."""
        self._intervals.clear()

    @property
    def fresh(self) -> bool:
        """Whether the cost was measured since ``forget``."""
        return len(self._intervals) >= 2

    @property
    def completeness(self) -> float:
        """How much was measured since ``forget``, of what will ever be taken into account: 0 to 1."""
        return min(1.0, self._measured_for(self._intervals))

    @staticmethod
    def _measured_for(intervals: Sequence[_Interval], but: int = 0) -> float:
        if len(intervals) <= but:
            return 0.0
        steps = sum(each.steps for each in intervals) - sum(intervals[at].steps for at in range(but))
        return min(steps / _RECENT, (len(intervals) - but) / _INTERVALS)

    def _find_baseline(self) -> None:
        while len(self._quiet) > _KEPT and self._quiet[0][0] <= self._taken - _RECENT:
            self._quiet.popleft()
        if len(self._quiet) < _ENOUGH:
            return
        quiet = [duration_s for _, duration_s in self._quiet]
        middle = median(quiet)
        deviation = 1.4826 * median([abs(each - middle) for each in quiet])
        limit = middle + max(_ODD * deviation, 0.1 * middle)
        usual = [each for each in quiet if each <= limit]
        self._usual = usual if len(quiet) - len(usual) <= math.ceil(_RARE * len(quiet)) else quiet
        # not the median: where some steps are long by nature the mean is more, and that would pass for overhead
        self.baseline_s = fmean(self._usual)
        if len(self._since_quiet) == _RECENT:
            self.baseline_s = min(self.baseline_s, median(self._since_quiet))

    def _weigh(self, steps: int, current: list[float], baseline_s: float) -> _Interval:
        longest_s = max(current)
        usually_s = median_low([*(each.longest_s for each in self._intervals), longest_s])
        limit_s = _ODD * max(usually_s, baseline_s)
        cost_s = sum(min(each, limit_s) - baseline_s for each in current)
        return _Interval(steps, len(current), longest_s, cost_s)

    def _estimate(self, intervals: Sequence[_Interval]) -> None:
        costs = sorted(each.cost_s for each in intervals)
        kept = costs[1:-1] if len(costs) > 2 else costs[:1]
        busy = fmean(each.busy for each in intervals)
        of_a_step = _deviation(self._usual)
        of_intervals = max(of_a_step * math.sqrt(busy), _deviation(kept)) / math.sqrt(len(kept))
        of_baseline = of_a_step * busy / math.sqrt(len(self._usual))
        self.cost_s, self.noise_s = fmean(kept), math.hypot(of_intervals, of_baseline)


def _deviation(values: list[float]) -> float:
    mean = fmean(values)  # statistics.pstdev computes with fractions, a hundred times as long
    return math.sqrt(fmean([(each - mean) ** 2 for each in values]))
