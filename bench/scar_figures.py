"""From the trials of a model to its figures: means, intervals, and what must be true of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scar_models import Floats
from scar_trials import LOST, METHODS, Outcome, Run

PARTIAL_AT_LEAST = {"1/4": 0.59, "1/2": 0.31, "3/4": 0.12}
"""The lower ends of the paper's ranges for partial recovery alone."""
PRIORITY_AT_LEAST = 0.78
"""The lower end of the paper's range with priority, half of the blocks lost."""
WITH_PRIORITY = ("mlr", "mf", "lda")
"""The models for which it holds in the paper; its network's bars read lower."""
_RESAMPLED = 4000


@dataclass(frozen=True)
class Estimate:
    """A mean, or a ratio of means, with its 95% interval."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        return f"{100 * self.value:.0f}% ({100 * self.low:.0f} to {100 * self.high:.0f})"

    def __str__(self) -> str:
        return f"{self.value:.1f} ({self.low:.1f} to {self.high:.1f})"


def mean(costs: Floats) -> Estimate:
    """Return the mean, with an interval from the trials drawn again (bootstrap)."""
    low, high = np.percentile(costs[_drawn(len(costs))].mean(1), [2.5, 97.5])
    return Estimate(float(costs.mean()), float(low), float(high))


def reduction(costs: Floats, full: Floats) -> Estimate:
    """Return how much less a method costs than a full recovery. Both are drawn again together: they are of the same
    failures."""
    drawn = _drawn(len(costs))
    many = 1 - costs[drawn].mean(1) / np.maximum(full[drawn].mean(1), 1e-9)
    low, high = np.percentile(many, [2.5, 97.5])
    return Estimate(float(1 - costs.mean() / full.mean()), float(low), float(high))


def _drawn(count: int) -> Any:
    return np.random.default_rng(count).integers(0, count, (_RESAMPLED, count))


@dataclass(frozen=True)
class Bound:
    """The theorem's bound and what was measured."""

    holds: int
    """In how many of the undisturbed runs its assumption holds,"""
    runs: int
    says: str
    checked: int
    """Recoveries in which it holds as well; each is compared."""
    violated: int
    cost: float | None
    """Mean of what these have cost, by distance to the fixed point,"""
    bound: float | None
    """and of what they may."""


def bound_of(runs: Sequence[Run]) -> Bound:
    """Compare each recovery with its own bound. Iterations are whole: a bound of 3.2 is kept by a cost of 4."""
    pairs = [(one.distance_cost, one.bound) for one in _outcomes(runs) if one.bound is not None]
    both = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    violated = int((both[:, 0] > np.ceil(both[:, 1])).sum())
    cost, bound = both.mean(0).tolist() if len(both) else (None, None)
    holds = sum(run.contraction.holds for run in runs)
    return Bound(holds, len(runs), str(runs[0].contraction), len(both), violated, cost, bound)


def _outcomes(runs: Sequence[Run]) -> list[Outcome]:
    """Return each recovery once: a full one is the same whatever is lost."""
    return [
        outcome
        for run in runs
        for number, lost in enumerate(LOST)
        for method in METHODS
        if number == 0 or method != "full"
        for outcome in run.outcomes[lost][method]
    ]


@dataclass(frozen=True)
class Figures:
    """What the trials of a model have shown, by the fraction lost and by method."""

    costs: dict[str, dict[str, Estimate]]
    reductions: dict[str, dict[str, Estimate]]
    bound: Bound
    trials: int
    given_up: int
    lengths: tuple[int, int]
    """How long the shortest and the longest undisturbed run was."""
    blocks: int

    def plain(self) -> dict[str, Any]:
        """Return them as JSON has them."""
        found: dict[str, Any] = {}
        for lost, methods in self.costs.items():
            found[lost] = {}
            for method, cost in methods.items():
                entry: dict[str, Any] = {"cost": cost.value, "cost_interval": [cost.low, cost.high]}
                if method != "full":
                    less = self.reductions[lost][method]
                    entry |= {"reduction": less.value, "interval": [less.low, less.high]}
                found[lost][method] = entry
        return found


def figures(runs: Sequence[Run]) -> Figures:
    """Put the trials of all runs of a model together."""
    costs: dict[str, dict[str, Estimate]] = {}
    reductions: dict[str, dict[str, Estimate]] = {}
    for lost in LOST:
        each = {
            method: np.array([outcome.cost for run in runs for outcome in run.outcomes[lost][method]], dtype=np.float64)
            for method in METHODS
        }
        costs[lost] = {method: mean(values) for method, values in each.items()}
        others = {method: values for method, values in each.items() if method != "full"}
        reductions[lost] = {method: reduction(values, each["full"]) for method, values in others.items()}
    lengths = [run.length for run in runs]
    return Figures(
        costs,
        reductions,
        bound_of(runs),
        sum(len(run.failures) for run in runs),
        sum(not outcome.arrived for outcome in _outcomes(runs)),
        (min(lengths), max(lengths)),
        runs[0].blocks,
    )


def missed(found: dict[str, Figures], compared: Sequence[str]) -> list[str]:
    """Return a sentence for each thing that should be true and is not. ``compared`` are the models of the tables."""
    wrong = []
    for model in compared:
        less = found[model].reductions
        for lost, least in PARTIAL_AT_LEAST.items():
            partial = less[lost]["partial"]
            if partial.value < least:
                wrong.append(f"{model}, {lost} lost: partial recovery saves {partial.percent()}, not {least:.0%}")
        priority = less["1/2"]["partial_priority"]
        if model in WITH_PRIORITY and priority.value < PRIORITY_AT_LEAST:
            wrong.append(f"{model}, 1/2 lost: with priority it saves {priority.percent()}, not {PRIORITY_AT_LEAST:.0%}")
    for model, each in found.items():
        if each.bound.violated:
            wrong.append(f"{model}: {each.bound.violated} of {each.bound.checked} recoveries cost more than the bound")
    if not any(each.bound.checked for each in found.values()):
        wrong.append("nothing was compared with the theorem's bound: its assumption holds for no recovery")
    return wrong
