"""What it costs an iterative algorithm to lose some of its state and go on with older values. Pure.

The theory is SCAR's (Qiao et al., ICML 2019). An algorithm x(k+1) = f(x(k)) with a fixed point x* is assumed to
*contract* towards it: ||f(x) - x*|| <= c ||x - x*|| for every x, with 0 < c < 1. Whatever happens to the state between
two iterations is a perturbation d, and training works it off by itself. From c, ||d|| and the distance that was still
to go follows a bound on the extra iterations.

The bound is a worst case, and only as good as the assumption. Stochastic gradients contract on the average at best,
samplers have no fixed point, and where there are many minima the disturbed run may find another one. So ``fit`` does
not only give c, it says whether what was seen agrees with the assumption, and if not, in what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where a series is fitted: planning has to do without, and is quick then
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEAST_POINTS = 5
"""With fewer, a line through the logarithms says more about chance than about the algorithm."""
_MOST_POINTS = 400
"""Of a longer series so many are used: slopes are taken between all pairs."""
_ROUNDING = 1e-12
"""Below this part of its largest value a series shows how numbers are rounded, not how the algorithm converges."""


class Series(Enum):
    """What the numbers are that ``fit`` is given; c is always that of the distance."""

    DISTANCE = "distance"
    """||x(k) - x*||: shrinks by c each time, which is the assumption itself."""
    UPDATE = "update"
    """||x(k+1) - x(k)||: shrinks by c where f brings *any* two states closer by c, not only a state and x*."""
    LOSS = "loss"
    """A loss whose least value is unknown. Its decrements are looked at; they shrink by c squared where the loss is
    quadratic around its minimum."""


@dataclass(frozen=True)
class Fit:
    """How a series converges. It prints as a sentence."""

    c: float | None
    """By how much the distance shrinks in a typical iteration; ``None``: the series does not say."""
    worst: float | None
    """The greatest factor of all iterations: the smallest c with which the assumption holds for each of them."""
    holds: bool
    """Whether every iteration that was seen contracts. It cannot say anything about those that were not."""
    reason: str
    points: int

    def __str__(self) -> str:
        rate = "" if self.c is None else f" (c = {self.c:.4g} typically, {_show(self.worst)} at worst)"
        return f"contraction {'holds' if self.holds else 'does not hold'}: {self.reason}{rate}"


@dataclass(frozen=True)
class Cost:
    """Extra iterations until an algorithm is where it would have been. It prints as a sentence."""

    expected: float | None
    """With the c of a typical iteration; ``None``: the series says nothing."""
    bound: float | None
    """With the c of the slowest iteration that was seen: the theorem's bound; ``None`` where its assumption fails.

    How far there is still to go is not known, only estimated from how far the state has moved: so is this."""
    fit: Fit

    def __str__(self) -> str:
        if self.expected is None:
            return f"its cost cannot be predicted: {self.fit.reason}"
        most = "" if self.bound is None else f", {self.bound:.1f} at the most"
        return f"about {self.expected:.1f} iterations more{most}; {self.fit}"


def iterations_to(target: float, *, distance: float, c: float) -> float:
    """Return kappa, after how many iterations a run is at most ``target`` away, from ``distance`` on."""
    _check_rate(c)
    _check_distance(distance)
    if not target > 0:
        raise ValueError(f"a distance of {target} is never reached by shrinking: give a target above 0")
    return max(math.log(distance / target) / math.log(1 / c), 0.0)


def cost_bound(perturbations: Iterable[tuple[int, float]], *, distance: float, c: float) -> float:
    """Return how many iterations more perturbations cost at the most: log(1 + D / ||x0 - x*||) / log(1 / c).

    D is the sum of ||d|| / c^k over the perturbations, each given as the iteration k before which it happens and its
    (expected) norm; ``distance`` is ||x0 - x*||. Iterations may be counted from the failure on: then k is 0, and
    ``distance`` is what was left to go. A run that contracts by exactly c and is thrown straight back loses this much.

    Compared are kappas: the bound is on when the disturbed run arrives, less when one arrives that contracts by exactly
    c. A run that goes faster than c while nothing happens, and slower afterwards, can lose more than this.
    """
    _check_rate(c)
    _check_distance(distance)
    # in logarithms: c^-k overflows after some thousands of iterations
    logs = [math.log(norm) - k * math.log(c) - math.log(distance) for k, norm in perturbations if _is_some(norm)]
    if not logs:
        return 0.0
    most = max(logs)
    total = most + math.log(sum(math.exp(value - most) for value in logs))
    grown = total + math.log1p(math.exp(-total)) if total > 0 else math.log1p(math.exp(total))
    return grown / math.log(1 / c)


def irreducible_error(c: float, norm: float) -> float:
    """Return how near a run comes that is perturbed by up to ``norm`` in *every* iteration: c / (1 - c) * norm."""
    _check_rate(c)
    return c / (1 - c) * norm if _is_some(norm) else 0.0


def partial_norm(norm: float, fraction: float) -> float:
    """Return the root of E||d'||^2 = p ||d||^2, what is left of a perturbation if only lost blocks are put back.

    ||d'|| <= ||d|| holds whatever is lost, since d' is d with zeros for the survivors. The expectation is over blocks
    lost uniformly at random, a fraction p of them; by Jensen's inequality E||d'|| is not greater than what is returned.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction of {fraction} of all blocks cannot be lost: give one from 0 to 1")
    return math.sqrt(fraction) * norm if _is_some(norm) else 0.0


def distance_left(moved: float, iterations: int, c: float) -> float:
    """Return ||x - x*|| now, given how far x has moved in the last so many iterations.

    An estimate: it is exact for a run that goes straight to x* and contracts by exactly c, so that what it has moved is
    (c^-n - 1) times what is left.
    """
    _check_rate(c)
    if iterations < 1:
        raise ValueError(f"nothing moves in {iterations} iterations: give 1 or more")
    growth = -iterations * math.log(c)
    return moved / math.expm1(growth) if growth < 700 else 0.0


def fit(values: Sequence[float], kind: Series = Series.DISTANCE, *, every: int = 1) -> Fit:
    """Return how the distance shrinks per iteration, from values that lie ``every`` iterations apart.

    The typical c is from the median of the slopes between all pairs of logarithms (Theil and Sen): a third of the
    values may be anything. What comes after the first value that is nothing but rounding is not used.
    """
    if every < 1:
        raise ValueError(f"values cannot lie {every} iterations apart: give 1 or more")
    import numpy as np

    series = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(series).all():
        return Fit(None, None, False, "the series has values that are not finite", len(series))
    if kind is Series.LOSS:
        series = series[:-1] - series[1:]
    series = _before_rounding(series)
    points = len(series)
    if points < LEAST_POINTS:
        return Fit(None, None, False, f"too few points: {points}, of {LEAST_POINTS} at least", points)
    rising = int((series <= 0).sum())
    if rising * 3 > points:
        what = "the loss rises" if kind is Series.LOSS else "the value is 0 or less"
        return Fit(None, None, False, f"not contracting: in {rising} of {points} points {what}", points)
    power = every * (2 if kind is Series.LOSS else 1)
    at, logs = np.flatnonzero(series > 0), np.log(series[series > 0])
    typical = math.exp(_median_slope(at, logs) / power)
    worst = math.exp(float((np.diff(logs) / np.diff(at)).max()) / power)
    away = int((np.diff(logs) >= 0).sum()) + rising
    if typical >= 1 - 1e-9:
        return Fit(None, worst, False, "not contracting: the series does not shrink", points)
    if away:
        reason = f"contracting only on the average: {away} of {points - 1} steps of the series do not shrink"
        return Fit(typical, worst, False, reason, points)
    return Fit(typical, worst, True, f"each of {points - 1} steps of the series shrinks", points)


def predict(
    norm: float, moved: Iterable[tuple[float, int]], since_look: int, speeds: Sequence[float], every: int
) -> Cost:
    """Return what a perturbation costs, from how fast the state has moved so far.

    ``speeds`` are distances per iteration, ``every`` iterations apart; ``since_look`` iterations ago was the last.
    ``moved``: how far each part of the state had moved then, and in how many iterations.
    """
    seen = fit(speeds, Series.UPDATE, every=every)
    if seen.c is None:
        return Cost(None, None, seen)
    if norm == 0:
        return Cost(0.0, 0.0 if seen.holds else None, seen)
    parts = list(moved)
    # one distance for both: a greater c would make it greater, and the bound with it smaller than what is expected
    left = [distance_left(far, iterations, seen.c) for far, iterations in parts if iterations > 0]
    distance = math.sqrt(sum(value**2 for value in left)) * seen.c**since_look
    if distance <= 0:
        return Cost(None, None, seen)
    expected = cost_bound([(0, norm)], distance=distance, c=seen.c)
    bound = cost_bound([(0, norm)], distance=distance, c=seen.worst) if seen.holds and seen.worst is not None else None
    return Cost(expected, bound, seen)


def _before_rounding(series: Floats) -> Floats:
    import numpy as np

    if not len(series):
        return series
    small = np.flatnonzero(np.abs(series) <= _ROUNDING * np.abs(series).max())
    return series[: small[0]] if len(small) else series


def _median_slope(at: NDArray[np.int64], logs: Floats) -> float:
    import numpy as np

    if len(at) > _MOST_POINTS:
        chosen = np.linspace(0, len(at) - 1, _MOST_POINTS).astype(np.int64)
        at, logs = at[chosen], logs[chosen]
    first, second = np.triu_indices(len(at), 1)
    return float(np.median((logs[second] - logs[first]) / (at[second] - at[first])))


def _is_some(norm: float) -> bool:
    if not norm >= 0:
        raise ValueError(f"the norm of a perturbation cannot be {norm}: give a number from 0 on")
    return norm > 0


def _check_rate(c: float) -> None:
    if not 0 < c < 1:
        raise ValueError(f"c = {c} is no contraction: the theory needs 0 < c < 1 (see what fit() says of the series)")


def _check_distance(distance: float) -> None:
    if not (math.isfinite(distance) and distance > 0):
        raise ValueError(f"a distance to the fixed point of {distance} cannot be compared with: give one above 0")


def _show(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
