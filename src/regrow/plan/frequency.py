"""How often to write a checkpoint to disk: as often as a budget of time allows. Pure: durations in, a number out.

A checkpoint is copied while the next step computes, and has to be copied before that step's update; then it is written
beside the training, one at a time. So it costs what the copy makes an update wait (``stall_s``), and what copy and
write slow down the steps beside them, which no formula knows. ``every`` is CheckFreq's formula for the first
(FAST 2021); the ``Governor`` measures both and keeps the whole under the budget.

Every rank must use the same number: one of them governs, the others are told.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from statistics import median

from regrow.plan.overhead import Overhead

_AIM = 0.65
"""The part of the budget that a change aims at: not all that a checkpoint costs shows in the steps beside it."""
_ROOM = 0.5
"""The part of the budget under which there is room: clear of what is aimed at, so that noise makes no to and fro."""
_MARGIN = 1.05
"""A new number fits copies and writes that are longer by this factor, for the same reason."""
_MOST_UP = 4
_MOST_DOWN = 2
_DEVIATIONS = 2.0
"""How far a measurement may be off: a change waits until it stands beyond that."""
_ENOUGH = 0.5
"""So much must be measured, of what is ever taken into account, until an overhead above the budget is believed: to
exceed a budget is worse than not to use it up."""
_SAVED = 16
"""Checkpoints whose copies and writes are the recent ones."""
_FREE = 0.01
"""The part of a step that a checkpoint is taken to cost at least: less cannot be measured."""
_FLAT = 1.5
"""At so many times Young and Daly's interval, or as small a part of it, what is lost is a twelfth more than the least.
What is nearer is not worth a change."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured of steps and checkpoints, in seconds."""

    iteration_s: float
    """A step that no checkpoint disturbs."""
    update_s: float
    """The part of it that changes the weights."""
    copy_s: float
    """Copying the state to the memory of the host."""
    write_s: float
    """Writing the copy to disk."""

    def __post_init__(self) -> None:
        if not self.iteration_s > 0:
            raise ValueError(f"iteration_s={self.iteration_s}: a step takes more than no time")
        for name in ("update_s", "copy_s", "write_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: a duration is 0 or more")


def stall_s(profile: Profile) -> float:
    """Return how long an update waits for the end of the copy, which runs beside the forward and backward before it."""
    return max(0.0, profile.copy_s - max(0.0, profile.iteration_s - profile.update_s))


def every(profile: Profile, overhead: float) -> int:
    """Return how many steps must lie between checkpoints at least: CheckFreq's k.

    One must be on disk before the next begins, and what updates wait must not be more than ``overhead`` (0.035 is
    3.5%) of the time.
    """
    _check_overhead(overhead)
    stall = stall_s(profile)
    in_flight = (profile.copy_s + profile.write_s - stall) / profile.iteration_s
    return max(_ceil(in_flight), _ceil(stall / (overhead * profile.iteration_s)), 1)


def young_daly(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds between checkpoints that lose the least in all: sqrt(2 * cost * MTBF).

    More often, and checkpoints cost more than they save; less often, and each failure loses more. ``cost_s`` is what a
    checkpoint costs the training, not how long its writing takes.
    """
    if not (cost_s >= 0 and mtbf_s > 0):
        raise ValueError(f"cost_s={cost_s}, mtbf_s={mtbf_s}: a cost is 0 or more, a time between failures more than 0")
    return math.sqrt(2 * cost_s * mtbf_s)


def young_daly_steps(cost_s: float, mtbf_s: float, iteration_s: float) -> int:
    """Return the same in steps, at least 1."""
    return max(1, round(young_daly(cost_s, mtbf_s) / iteration_s))


@dataclass(frozen=True)
class Proposal:
    """How many steps the next interval should have, and why. The reason is empty if nothing has changed."""

    every: int
    reason: str = ""


class Governor:
    """Adapts the number of steps between checkpoints to what they are measured to cost.

    ``step`` takes the duration of each step, ``saved`` the times of each checkpoint, and ``turn`` ends an interval:
    call it when the next checkpoint begins. How the cost is measured is told in :mod:`regrow.plan.overhead`.

    The number goes up in proportion (fourfold at most) when the overhead exceeds the budget, and at once when
    the formula asks for more. It goes down, by half at most and never below the formula, when there is clearly room.
    Either way the measurement has to be beyond its noise; but the longer it was measured, the less doubt is left to an
    overhead that is above the budget by a little, so that it does not stay. After a change, only what is measured from
    then on counts.

    With ``mtbf_s``, the number is the greater one of the budget's and Young and Daly's: checkpoints are never more
    frequent than the budget allows, whatever they would save; nor than is worth it, however cheap they are.

    Args:
        overhead: the budget, as a part of the time without checkpoints.
        start: the number to begin with. Its first interval, before any checkpoint, gives the baseline.
        mtbf_s: the mean time between failures, if it is known.
        fixed: always this number: measure, but change nothing.
    """

    def __init__(
        self, *, overhead: float = 0.035, start: int = 20, mtbf_s: float | None = None, fixed: int | None = None
    ) -> None:
        _check_overhead(overhead)
        if start < 1 or (fixed is not None and fixed < 1):
            raise ValueError(f"start={start}, fixed={fixed}: an interval has at least 1 step")
        if mtbf_s is not None and not mtbf_s > 0:
            raise ValueError(f"mtbf_s={mtbf_s}: the mean time between failures is more than 0")
        self.overhead = overhead
        self.mtbf_s = mtbf_s
        self.fixed = fixed
        self._budgeted = start
        self._worthwhile = 1
        self._measured = Overhead()
        self._saved: deque[tuple[float, float, float]] = deque(maxlen=_SAVED)

    @property
    def every(self) -> int:
        """The number of steps from one checkpoint to the next."""
        return max(self._budgeted, self._worthwhile) if self.fixed is None else self.fixed

    @property
    def measured(self) -> float | None:
        """The overhead, as a part of the time without checkpoints; ``None`` until two checkpoints were measured."""
        baseline_s, cost_s = self._measured.baseline_s, self._measured.cost_s
        return None if baseline_s is None or cost_s is None else max(0.0, cost_s) / (self.every * baseline_s)

    @property
    def profile(self) -> Profile | None:
        """What was measured, for the formula: the baseline, and the medians of the recent checkpoints."""
        baseline_s = self._measured.baseline_s
        if baseline_s is None or not self._saved:
            return None
        copy_s, write_s, update_s = (median(times) for times in zip(*self._saved, strict=True))
        return Profile(iteration_s=baseline_s, update_s=update_s, copy_s=copy_s, write_s=write_s)

    def step(self, duration_s: float, *, busy: bool, excluded: bool = False) -> None:
        """Take in a step: how long it was, whether a checkpoint was under way, whether it was out of the ordinary."""
        self._measured.step(duration_s, busy=busy, excluded=excluded)

    def adopt(self, number: int) -> None:
        """Take over what all ranks have agreed on: the greatest number that one of them has proposed."""
        if self.fixed is None and number != self.every:
            self._budgeted = number
            self._measured.forget()

    @property
    def baseline_s(self) -> float | None:
        """How long a step takes that no checkpoint disturbs; ``None`` as long as that is not known."""
        return self._measured.baseline_s

    def saved(self, *, copy_s: float, write_s: float, update_s: float = 0.0) -> None:
        """Take in a checkpoint: how long its copy and its write took, and the update that the copy had to precede."""
        self._saved.append((copy_s, write_s, update_s))

    def turn(self) -> Proposal:
        """End the interval; return how long the next one should be."""
        self._measured.turn()
        before, profile = self.every, self.profile
        if self.fixed is not None:
            return Proposal(before)
        if self._measured.baseline_s is None:
            self._budgeted *= 2  # in the end it is longer than a checkpoint takes
            return Proposal(self.every, "there were too few steps without a checkpoint to compare with")
        if profile is None:
            return Proposal(before)
        budgeted, reason = self._for_the_budget(profile)
        worthwhile = self._for_its_worth(profile)
        if self.mtbf_s is not None and worthwhile > budgeted:
            reason = f"more often is not worth it: Young/Daly for an MTBF of {_show_s(self.mtbf_s)}"
        self._budgeted, self._worthwhile = budgeted, worthwhile
        if self.every == before:
            return Proposal(before)
        self._measured.forget()
        return Proposal(self.every, reason)

    def _for_the_budget(self, profile: Profile) -> tuple[int, str]:
        """Return the number that the budget allows, and why if it is another one."""
        before, least = self._budgeted, every(profile, self.overhead)
        longer = replace(profile, copy_s=profile.copy_s * _MARGIN, write_s=profile.write_s * _MARGIN)
        roomy = every(longer, self.overhead)
        if before < least:
            return roomy, "copy and write take longer than the interval, or updates wait for copies too often"
        cost_s, noise_s = self._measured.cost_s, self._measured.noise_s
        if cost_s is None or not self._measured.fresh:
            return before, ""
        allowed_s = self.overhead * profile.iteration_s  # per step
        overhead, wanted = cost_s / (before * profile.iteration_s), _ceil(cost_s / (_AIM * allowed_s))
        doubt_s = _DEVIATIONS * noise_s
        doubtful_s = doubt_s * max(1 - self._measured.completeness / _ENOUGH, 0.0)
        if cost_s - doubtful_s > before * allowed_s:
            wanted = min(max(wanted, before + 1), before * _MOST_UP)
            return wanted, f"an overhead of {overhead:.2%} is over the budget of {self.overhead:.2%}"
        if cost_s + doubt_s < _ROOM * before * allowed_s:
            wanted = min(max(wanted, roomy, -(-before // _MOST_DOWN)), before)
            return wanted, f"an overhead of {overhead:.2%} leaves room in the budget of {self.overhead:.2%}"
        return before, ""

    def _for_its_worth(self, profile: Profile) -> int:
        """Return the number below which checkpoints are not worth it: Young and Daly's, once it is clearly another."""
        before, doubt_s = self._worthwhile, _DEVIATIONS * self._measured.noise_s
        likely = self._young_daly(profile)
        at_least, at_most = self._young_daly(profile, -doubt_s), self._young_daly(profile, doubt_s)
        if likely is None or at_least is None or at_most is None or not self._measured.fresh:
            return before
        return likely if at_least > before * _FLAT or at_most < before / _FLAT else before

    def _young_daly(self, profile: Profile, off_s: float = 0.0) -> int | None:
        if self.mtbf_s is None or self._measured.cost_s is None:
            return None
        cost_s = max(stall_s(profile), self._measured.cost_s + off_s, _FREE * profile.iteration_s)
        return young_daly_steps(cost_s, self.mtbf_s, profile.iteration_s)

    def explain(self) -> str:
        """Say in one line how often, and from which measurements."""
        told = f"every {self.every} steps" + (" (fixed)" if self.fixed is not None else "")
        profile, measured = self.profile, self.measured
        if profile is None:
            return f"{told}: nothing measured yet"
        told += (
            f": copy {profile.copy_s:.3f} s (stalls {stall_s(profile):.3f} s), write {profile.write_s:.3f} s, "
            f"step {profile.iteration_s:.3f} s, overhead "
        )
        told += "not measured yet" if measured is None else f"{measured:.1%} of {self.overhead:.1%}"
        worthwhile = self._young_daly(profile)
        if self.mtbf_s is not None and worthwhile is not None:
            told += f"; Young/Daly for an MTBF of {_show_s(self.mtbf_s)}: every {worthwhile} steps"
        return told


def _check_overhead(overhead: float) -> None:
    if not overhead > 0:
        raise ValueError(f"overhead={overhead}: a part of the time, 0.035 for 3.5%; nothing is free")


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)  # 0.3 / 0.1 is three steps, whatever floats make of it


def _show_s(seconds: float) -> str:
    for unit, factor in (("h", 3600), ("min", 60)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds:.3g} s"
