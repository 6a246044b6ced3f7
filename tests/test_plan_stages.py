"""Positions of a pipeline's ranks: tables of who holds what, and the latest that is possible, checked by trying all."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan import Copy, Holding, Indices, Load, Own, Replay, Settle, Undo, make_plan
from regrow.plan.stages import _served, candidates, latest_positions


def held(rank, step, *, stage=None, domain=None, saved=(0,), journal=0, recent=None, **more):
    return Holding(
        rank=Rank(rank),
        step=None if step is None else Step(step),
        params=4,
        layout=f"stage {rank if stage is None else stage}",
        stage=rank if stage is None else stage,
        domain=f"rank {rank}" if domain is None else domain,
        checkpoints=tuple(map(Step, saved)),
        journal_from=None if step is None else Step(journal),
        recent_from=None if step is None else Step(step - 1 if recent is None else recent),
        **more,
    )


def actions(plan, kind):
    return [action for action in plan.actions if isinstance(action, kind)]


def test_a_lost_stage_is_replayed_while_the_others_keep_their_state():
    plan = make_plan([held(0, 47, saved=(20, 40)), held(1, None, saved=(20, 40)), held(2, 48, saved=(20, 40))])
    assert plan.positions == (47, 40, 48)
    assert actions(plan, Load) == [Load(rank=1, step=40)]
    assert actions(plan, Replay) == [
        Replay(rank=0, first=47, last=47, sources=(2,)),
        Replay(rank=1, first=40, last=47, sources=(0, 2)),
    ]
    assert "replay   rank 1: steps 40 to 47 from the journals of ranks 0, 2" in plan.lines()
    assert "they keep their state" in plan.reason


def test_two_neighbours_are_replayed_together():
    plan = make_plan([held(0, 47), held(1, None, saved=(40,)), held(2, None, saved=(40,)), held(3, 47)])
    assert plan.positions == (47, 40, 40, 47)


def test_a_replica_is_copied_and_not_replayed():
    plan = make_plan([held(0, 9), held(1, 9), held(2, None, stage=0, own_steps=(Step(9),)), held(3, 9, stage=1)])
    assert plan.positions == (9, 9, 9, 9)
    assert actions(plan, Copy) == [Copy(rank=2, sources=(0,), step=9, params=None, staged=False)]
    assert "a replica of rank 2 lives" in plan.reason


def test_a_replica_whose_own_state_is_unknown_is_no_source():
    plan = make_plan([held(0, 9), held(1, None, stage=0, own_steps=(Step(3),))])
    assert plan.positions == (0, 0)


def test_all_replicas_of_a_stage_are_lost():
    plan = make_plan([held(0, 9), held(1, None, saved=(5,)), held(2, 9, stage=0), held(3, None, stage=1, saved=(5,))])
    assert plan.positions == (9, 5, 9, 5)


def test_within_a_domain_nothing_but_the_last_step_is_kept():
    """Ranks 0 and 1 fail together: when rank 1 is lost, rank 0 has not kept what it sent it."""
    plan = make_plan(
        [
            held(0, 47, domain="a", saved=(40,)),
            held(1, None, domain="a", saved=(40,)),
            held(2, 47, domain="b", saved=(40,)),
        ]
    )
    assert plan.positions == (40, 40, 47)
    assert "must go back, too" in plan.reason


def test_survivors_of_one_domain_may_stand_a_step_apart():
    plan = make_plan([held(0, 47, domain="a"), held(1, 48, domain="a")])
    assert plan.positions == (47, 48)


def test_a_damaged_journal_takes_everyone_back():
    rows = [held(0, 47, saved=(20, 40)), held(1, None, saved=(20, 40), damaged=((Rank(0), Step(44)),))]
    assert make_plan(rows).positions == (40, 40)
    harmless = held(1, None, saved=(20, 40), damaged=((Rank(0), Step(39)),))
    assert make_plan([rows[0], harmless]).positions == (47, 40)


def test_a_damaged_checkpoint_takes_everyone_to_the_one_before():
    plan = make_plan([held(0, 47, saved=(20, 40), journal=40), held(1, None, saved=(20,))])
    assert plan.positions == (20, 20)


def test_an_update_is_taken_back():
    done = Indices.of([0, 1])
    plan = make_plan([held(0, 5, updated=done, undoable=done), held(1, 5)])
    assert plan.positions == (5, 5)
    assert actions(plan, Undo) == [Undo(rank=0, to_step=5, params=done, exact=True)]


def test_an_update_that_cannot_be_taken_back_goes_to_the_checkpoint():
    plan = make_plan([held(0, 5, updated=Indices.of([0]), why_not="it was updated twice"), held(1, 5)])
    assert plan.positions == (0, 5)
    assert [action.own for action in actions(plan, Settle)] == [Own.CHECKPOINT, Own.CAPTURED]


def test_a_replica_that_has_loaded_the_checkpoint_already_is_no_source_for_one_that_has_not():
    """A failure came between the two: who stands elsewhere knows its own random numbers from the checkpoint only."""
    other = held(2, None, saved=(5,), domain="x")
    for late in (held(1, 9, stage=0, saved=(5,)), held(1, None, stage=0, saved=(5,), own_steps=(Step(9),))):
        plan = make_plan([held(0, 5, saved=(5,)), late, other])
        assert plan.positions == (5, 5, 5)
        assert actions(plan, Load) == [Load(rank=1, step=5), Load(rank=2, step=5)]
        assert actions(plan, Copy) == []


def test_who_copies_a_step_has_sent_what_its_replica_has_unless_it_was_found_otherwise():
    rows = [held(0, 9), held(1, 8, stage=0), held(2, 8)]
    assert make_plan(rows).positions == (9, 9, 8)
    missing = held(2, 8, damaged=((Rank(1), Step(8)),))
    assert make_plan([*rows[:2], missing]).positions == (0, 0, 8)


def test_nothing_is_left():
    with pytest.raises(Unrecoverable, match="no checkpoint on its storage"):
        make_plan([held(0, 5), held(1, None, saved=())])


def test_some_named_their_stage_and_others_did_not():
    with pytest.raises(ValueError, match="on all of them, or on none"):
        make_plan([held(0, 5), Holding(rank=Rank(1), step=Step(5), params=4, layout="x")])


def test_a_holding_travels_as_json():
    holding = held(1, 7, saved=(0, 5), damaged=((Rank(2), Step(3)),))
    assert Holding.from_json(json.loads(json.dumps(holding.to_json()))) == holding


@st.composite
def pipelines(draw):
    domains = draw(st.lists(st.integers(0, 2), min_size=2, max_size=4))
    rows = []
    for rank, domain in enumerate(domains):
        saved = draw(st.lists(st.integers(0, 5), max_size=3, unique=True))
        if draw(st.booleans()):
            rows.append(held(rank, None, domain=str(domain), saved=saved))
        else:
            step = draw(st.integers(3, 6))
            journal = draw(st.integers(0, 5))
            rows.append(
                held(rank, step, domain=str(domain), saved=saved, journal=journal, recent=max(journal, step - 1))
            )
    return rows


def possible(rows, positions):
    return all(
        positions[a.rank] <= positions[b.rank] or _served(a, b, positions[b.rank], positions[a.rank], {})
        for a, b in itertools.permutations(rows, 2)
    )


@given(pipelines())
def test_positions_are_the_latest_that_are_possible(rows):
    stages = {holding.stage: [holding] for holding in rows}
    every = list(itertools.product(*(candidates([row]) for row in rows)))
    allowed = [combination for combination in every if possible(rows, combination)]
    if not allowed:
        with pytest.raises(Unrecoverable):
            latest_positions(stages)
        return
    latest = tuple(map(max, zip(*allowed, strict=True)))
    assert latest in allowed
    assert tuple(latest_positions(stages)[row.rank] for row in rows) == latest
