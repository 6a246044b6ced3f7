"""Which blocks a running checkpoint saves next, and how much of the state."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.plan.priority import Chooser, Priority, Schedule


def test_an_eighth_eight_times_as_often():
    schedule = Schedule(16, 1 / 8)
    assert (schedule.period, schedule.share) == (2, 1 / 8)
    assert [k for k in range(1, 9) if schedule.due(k)] == [2, 4, 6, 8]


@given(every=st.integers(1, 200), fraction=st.floats(0.001, 1.0))
def test_as_much_is_written_as_by_full_checkpoints(every, fraction):
    schedule = Schedule(every, fraction)
    assert schedule.share * every / schedule.period == pytest.approx(1.0)


@pytest.mark.parametrize(("every", "fraction"), [(0, 0.5), (8, 0.0), (8, 1.5)])
def test_schedules_that_cannot_be(every, fraction):
    with pytest.raises(ValueError, match="give"):
        Schedule(every, fraction)


def choose(priority, share, *, moved, norms=(), saved_at=None, iteration=1, seed=0):
    chooser = Chooser(priority, share, seed=seed)
    blocks = len(moved)
    return chooser.choose(iteration, sizes=[8] * blocks, moved=moved, norms=norms, saved_at=saved_at or [0] * blocks)


def test_the_farthest_first():
    moved = [0.1, 5.0, 0.2, 3.0]
    assert choose(Priority.DISTANCE, 0.5, moved=moved) == [1, 3]
    assert choose(Priority.RELATIVE, 0.5, moved=moved, norms=[0.01, 100.0, 0.1, 100.0]) == [0, 2]
    assert choose(Priority.RELATIVE, 0.25, moved=[0.0, 1.0], norms=[0.0, 0.0]) == [1]


def test_small_blocks_have_their_turn():
    """The first has moved farthest, but for its bytes all others can be had, and they take more off the distance."""
    chooser = Chooser(Priority.DISTANCE, 0.5)
    assert chooser.choose(1, sizes=[80, 10, 10, 60], moved=[4.0, 2.0, 3.0, 3.2], saved_at=[0] * 4) == [2, 1, 0]


def test_ties_go_by_order():
    assert choose(Priority.DISTANCE, 0.5, moved=[1.0] * 4) == [0, 1]


def test_what_is_not_finite_is_never_saved():
    moved = [float("nan"), 1.0, float("inf"), 0.0]
    assert choose(Priority.DISTANCE, 1.0, moved=moved) == [1, 3]
    assert sorted(choose(Priority.RANDOM, 1.0, moved=moved)) == [1, 3]


def test_round_robin_takes_all_in_turn():
    chooser, saved_at, seen = Chooser(Priority.ROUND_ROBIN, 0.25), [0] * 8, []
    for iteration in range(1, 5):
        chosen = chooser.choose(iteration, sizes=[4] * 8, moved=[1.0] * 8, saved_at=saved_at)
        seen += chosen
        for block in chosen:
            saved_at[block] = iteration
    assert seen == list(range(8))


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    share=st.floats(0.02, 1.0),
    priority=st.sampled_from(list(Priority)),
    seed=st.integers(0, 5),
)
def test_no_round_leaves_much_undone_and_all_together_write_their_share(sizes, share, priority, seed):
    chooser, blocks, rounds = Chooser(priority, share, seed=seed), len(sizes), 40
    saved_at, written = [0] * blocks, 0
    for iteration in range(1, rounds + 1):
        moved = [float(iteration - at) for at in saved_at]
        chosen = chooser.choose(iteration, sizes=sizes, moved=moved, norms=[1.0] * blocks, saved_at=saved_at)
        assert len(set(chosen)) == len(chosen)
        for block in chosen:
            saved_at[block], written = iteration, written + sizes[block]
    due = rounds * share * sum(sizes)
    assert due - 1e-6 * due <= written <= due + max(sizes)


def test_chance_is_the_same_in_every_process():
    code = (
        "from regrow.plan.priority import Chooser, Priority\n"
        "c = Chooser(Priority.RANDOM, 0.25, seed=3)\n"
        "print([c.choose(k, sizes=[1] * 12, moved=[1.0] * 12, saved_at=[0] * 12) for k in range(6)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": h},
        ).stdout
        for h in ("1", "2")
    }
    assert len(told) == 1
    rounds = [choose(Priority.RANDOM, 0.25, moved=[1.0] * 12, iteration=k, seed=3) for k in range(6)]
    assert len({tuple(chosen) for chosen in rounds}) > 1
    assert choose(Priority.RANDOM, 0.25, moved=[1.0] * 12, seed=4) != choose(
        Priority.RANDOM, 0.25, moved=[1.0] * 12, seed=5
    )
