"""SCAR's theory: what a perturbation costs, and whether a series agrees with what is assumed."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.perturbation import (
    Series,
    cost_bound,
    distance_left,
    fit,
    irreducible_error,
    iterations_to,
    partial_norm,
    predict,
)

RATES = st.floats(0.05, 0.99)


def test_iterations_to_a_target():
    assert iterations_to(0.25, distance=1.0, c=0.5) == pytest.approx(2)
    assert iterations_to(2.0, distance=1.0, c=0.5) == 0


@given(c=RATES, distance=st.floats(1e-3, 1e3), norm=st.floats(1e-3, 1e3), at=st.integers(0, 40))
def test_the_bound_is_what_a_run_thrown_straight_back_loses(c, distance, norm, at):
    bound = cost_bound([(at, norm)], distance=distance, c=c)
    left = distance * c**at
    assert bound == pytest.approx(math.log((left + norm) / left) / math.log(1 / c), rel=1e-6)


@given(
    c=st.floats(0.3, 0.97),
    throws=st.dictionaries(st.integers(0, 30), st.floats(1e-3, 5.0), min_size=1, max_size=6),
    turns=st.lists(st.floats(0, 2 * math.pi), min_size=31, max_size=31),
)
def test_no_run_that_contracts_loses_more_than_the_bound(c, throws, turns):
    """A spiral in the plane, thrown in any direction: the undisturbed one contracts by exactly c."""
    spin = 0.7

    def arrival(perturbed: bool) -> int:
        x, k = np.array([1.0, 0.0]), 0
        turn = np.array([[math.cos(spin), -math.sin(spin)], [math.sin(spin), math.cos(spin)]])
        while k <= 31 or np.linalg.norm(x) > 1e-6:
            if perturbed and k in throws:
                x = x + throws[k] * np.array([math.cos(turns[k]), math.sin(turns[k])])
            x, k = c * (turn @ x), k + 1
        return k

    allowed = cost_bound(throws.items(), distance=1.0, c=c)
    assert arrival(True) - arrival(False) <= allowed + 1 + 1e-6  # whole iterations


def test_many_iterations_do_not_overflow():
    assert cost_bound([(100_000, 1.0)], distance=1.0, c=0.5) == pytest.approx(100_000)
    assert cost_bound([], distance=1.0, c=0.5) == 0
    assert cost_bound([(3, 0.0)], distance=1.0, c=0.5) == 0


def test_faults_in_every_iteration_leave_an_error():
    c, norm, x = 0.8, 0.1, 5.0
    for _ in range(200):
        x = c * (x + norm)
    assert x == pytest.approx(irreducible_error(c, norm))


def test_a_random_part_of_a_perturbation():
    dice = np.random.default_rng(0)
    moved = dice.normal(size=400)
    whole = float(np.linalg.norm(moved))
    squares = []
    for _ in range(2000):
        lost = moved.copy()
        lost[dice.permutation(400)[:300]] = 0
        assert np.linalg.norm(lost) <= whole
        squares.append(float(lost @ lost))
    assert math.sqrt(np.mean(squares)) == pytest.approx(partial_norm(whole, 0.25), rel=0.01)
    assert np.mean(np.sqrt(squares)) <= partial_norm(whole, 0.25) * 1.001


@given(c=RATES, iterations=st.integers(1, 50), left=st.floats(1e-3, 1e3))
def test_the_distance_left_of_a_straight_run(c, iterations, left):
    moved = left / c**iterations - left
    if moved / left < 1e12:
        assert distance_left(moved, iterations, c) == pytest.approx(left, rel=1e-2)


@given(c=st.floats(0.6, 0.98), start=st.floats(1e-3, 1e3), every=st.integers(1, 4))
def test_an_exact_series_gives_its_rate_whatever_it_is_of(c, start, every):
    distances = [start * c ** (every * k) for k in range(12)]
    assert fit(distances, every=every).c == pytest.approx(c, rel=1e-6)
    assert fit(distances, every=every).worst == pytest.approx(c, rel=1e-6)
    assert fit(distances, every=every).holds
    updates = [a - b for a, b in pairwise(distances)]
    assert fit(updates, Series.UPDATE, every=every).c == pytest.approx(c, rel=1e-6)
    losses = [7.0 + start * c ** (2 * k) for k in range(8)]
    if start * c**16 > 1e-6:
        assert fit(losses, Series.LOSS).c == pytest.approx(c, rel=1e-3)


def test_outliers_do_not_move_the_typical_rate():
    series = [0.9**k for k in range(60)]
    for place in (7, 20, 33, 48):
        series[place] *= 25
    found = fit(series)
    assert found.c == pytest.approx(0.9, abs=0.01)
    assert not found.holds
    assert "4 of 59 steps" in found.reason


@pytest.mark.parametrize(
    ("series", "kind", "reason"),
    [
        ([1.0, 0.5], Series.DISTANCE, "too few points: 2"),
        ([], Series.UPDATE, "too few points: 0"),
        ([1.0, 1.1, 1.2, 1.3, 1.4, 1.5], Series.DISTANCE, "does not shrink"),
        ([3.0] * 9, Series.UPDATE, "does not shrink"),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0], Series.LOSS, "the loss rises"),
        ([1.0, float("nan"), 0.5, 0.2, 0.1], Series.DISTANCE, "not finite"),
    ],
)
def test_it_says_why_not(series, kind, reason):
    found = fit(series, kind)
    assert not found.holds
    assert found.c is None
    assert reason in str(found)


def test_rounding_at_the_end_is_not_looked_at():
    series = [0.1**k for k in range(12)] + [1e-16, 2e-16, 1e-16, 3e-16]
    assert fit(series).holds


@pytest.mark.parametrize("norm", [0.02, 0.1, 0.3, 3.0])
def test_the_bound_is_not_below_what_is_expected(norm):
    """One slow iteration makes c greater, but must not make what is left to go greater, too."""
    speeds = [0.9**k for k in range(12)]
    speeds[6:] = [value * 1.1 for value in speeds[6:]]
    cost = predict(norm, [(1.0, 16)], 3, speeds, 1)
    assert cost.fit.holds and cost.fit.worst > cost.fit.c
    assert cost.expected < cost.bound


@pytest.mark.parametrize("c", [0.0, 1.0, 1.5, float("nan")])
def test_no_contraction_no_bound(c):
    with pytest.raises(ValueError, match="needs 0 < c < 1"):
        cost_bound([(0, 1.0)], distance=1.0, c=c)
