"""The planner is pure, so its tests are tables: who holds what, and what must come out."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan import Copy, Holding, Indices, Own, Plan, Settle, Undo, make_plan

PARAMS = 4


def held(rank, step, updated=(), undoable=None, exact=True, **more):
    undoable = updated if undoable is None else undoable
    return Holding(
        rank=Rank(rank),
        step=None if step is None else Step(step),
        params=PARAMS,
        layout="same",
        updated=Indices.of(updated),
        undoable=Indices.of(undoable),
        exact=exact,
        **more,
    )


def fresh(rank, *own_steps, live=None):
    return held(rank, None, own_steps=tuple(own_steps), live_step=live)


def actions(plan: Plan, kind):
    return [action for action in plan.actions if isinstance(action, kind)]


def test_nobody_updated_runs_the_step_again():
    plan = make_plan([held(0, 5), fresh(1, 5), held(2, 5)])
    assert plan.step == 5
    assert actions(plan, Undo) == []
    assert actions(plan, Copy) == [Copy(rank=1, sources=(0, 2), step=5, params=None, staged=False)]
    assert "runs again" in plan.reason


def test_roll_forward_beats_undo():
    plan = make_plan([held(0, 5), held(1, 6), fresh(2, 6)])
    assert plan.step == 6
    assert actions(plan, Undo) == []
    assert Copy(rank=0, sources=(1,), step=6, params=None, staged=True) in plan.actions
    assert Copy(rank=2, sources=(1,), step=6, params=None, staged=False) in plan.actions
    assert Settle(rank=0, step=6, own=Own.CURRENT) in plan.actions


def test_copy_beats_undo_parameter_by_parameter():
    plan = make_plan([held(0, 5, updated=[0, 1]), held(1, 5, updated=[0]), fresh(2, 5)])
    assert plan.step == 5
    assert actions(plan, Undo) == [
        Undo(rank=0, to_step=5, params=Indices.of([0]), exact=True),
        Undo(rank=1, to_step=5, params=Indices.of([0]), exact=True),
    ]
    assert Copy(rank=0, sources=(1,), step=5, params=Indices.of([1]), staged=True) in plan.actions


def test_exact_undo_is_preferred_and_copied_to_the_others():
    plan = make_plan([held(0, 5, updated=[2], exact=False), held(1, 5, updated=[2]), fresh(2, 5)])
    assert actions(plan, Undo) == [Undo(rank=1, to_step=5, params=Indices.of([2]), exact=True)]
    assert Copy(rank=0, sources=(1,), step=5, params=Indices.of([2]), staged=True) in plan.actions
    assert not plan.used_arithmetic_undo


def test_arithmetic_undo_is_said():
    plan = make_plan([held(0, 5, updated=[2], exact=False), fresh(1, 5)])
    assert plan.used_arithmetic_undo
    assert "within a few ulp" in "\n".join(plan.lines())


def test_what_cannot_be_undone_stops_with_its_reason():
    with pytest.raises(Unrecoverable, match="overwritten"):
        make_plan([held(0, 5, updated=[1], undoable=[], why_not="its gradient was overwritten"), fresh(1, 5)])


def test_everyone_lost():
    with pytest.raises(Unrecoverable, match="no one holds"):
        make_plan([fresh(0, 5), fresh(1, 5)])


def test_predecessor_that_died_after_the_update_left_its_state_before_its_last_collective():
    plan = make_plan([held(0, 6), fresh(1, 4, 5, live=5)])
    assert Settle(rank=1, step=6, own=Own.PREDECESSOR_LIVE) in plan.actions
    assert plan.warnings == ()
    unsteady = make_plan([held(0, 6, steady=False), fresh(1, 4, 5, live=5)])
    assert "random numbers" in unsteady.warnings[0]


def test_lost_small_state_is_named():
    with pytest.raises(Unrecoverable, match="rank 1: the random state"):
        make_plan([held(0, 6), fresh(1, 3, 4, live=4)])


def test_ranks_that_train_other_models_are_refused():
    other = Holding(rank=Rank(1), step=Step(5), params=PARAMS + 1, layout="other")
    with pytest.raises(ValueError, match="same model"):
        make_plan([held(0, 5), other])


def test_ranks_too_far_apart_are_refused():
    with pytest.raises(Unrecoverable, match="not replicas"):
        make_plan([held(0, 5), held(1, 7), fresh(2, 5)])


def test_plan_prints():
    lines = make_plan([held(0, 5, updated=[0]), fresh(1, 5)]).lines()
    assert lines[0].startswith("go on at step 5")
    assert any(line.startswith("undo     rank 0: 1 parameters") for line in lines)
    assert any(line.startswith("copy     rank 1: everything at step 5 from rank 0") for line in lines)


subsets = st.sets(st.integers(0, PARAMS - 1))


@given(st.lists(st.tuples(st.booleans(), subsets), min_size=1, max_size=4), st.integers(1, 2))
def test_every_mixture_ends_with_every_parameter_at_one_step(survivors, replaced):
    """Carry the plan out on paper: afterwards every rank holds every parameter at the plan's step."""
    ahead_anyone = any(ahead for ahead, _ in survivors)
    holdings = []
    for rank, (ahead, updated) in enumerate(survivors):
        holdings.append(held(rank, 6 if ahead else 5, updated=() if ahead_anyone else updated))
    holdings += [fresh(len(survivors) + i, 5, live=5) for i in range(replaced)]
    plan = make_plan(holdings)
    versions = {h.rank: None if h.fresh else [h.step + (i in h.updated) for i in range(PARAMS)] for h in holdings}
    for action in plan.actions:
        if isinstance(action, Undo):
            for i in action.params:
                assert versions[action.rank][i] == plan.step + 1
                versions[action.rank][i] = plan.step
    for staged in (True, False):
        for copy in (a for a in plan.actions if isinstance(a, Copy) and a.staged is staged):
            wanted = range(PARAMS) if copy.params is None else copy.params
            target = versions[copy.rank] or [None] * PARAMS
            for i in wanted:
                assert all(versions[source][i] == plan.step for source in copy.sources), (copy, versions)
                target[i] = plan.step
            versions[copy.rank] = target
    assert all(version == [plan.step] * PARAMS for version in versions.values())
    settled = [a.rank for a in plan.actions if isinstance(a, Settle)]
    assert settled == sorted(versions)
    for order in itertools.islice(itertools.permutations(holdings), 6):
        assert make_plan(list(order)) == plan


@given(subsets)
def test_indices_behave_as_sets(items):
    indices = Indices.of(items)
    assert list(indices) == sorted(items)
    assert len(indices) == len(items)
    assert Indices.from_json(json.loads(json.dumps(indices.to_json()))) == indices
    assert set(Indices.span(PARAMS) - indices) == set(range(PARAMS)) - items
    assert all(item in indices for item in items)


def test_holdings_travel_as_json():
    holding = held(3, 7, updated=[0, 2], undoable=[2], exact=False, why_not="x", own_steps=(Step(6), Step(7)))
    assert Holding.from_json(json.loads(json.dumps(holding.to_json()))) == holding
