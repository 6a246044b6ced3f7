"""Where ranks of sharded state go on, for every combination of what is left."""

from __future__ import annotations

import itertools

import pytest

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan import Copy, Holding, Indices, Own, Restore, Settle, make_plan


def rank(number: int, step: int | None, *snapshots: int, place: str | None = None, **more) -> Holding:
    fields = {
        "params": 4,
        "layout": "same",
        "place": place if place is not None else f"part {number}",
        "snapshots": tuple((Step(step), 0) for step in snapshots),
        "snapshot_bytes": 1000,
        "state_bytes": 1000,
    }
    return Holding(rank=Rank(number), step=None if step is None else Step(step), **{**fields, **more})


def actions(plan, kind):
    return {action.rank: action for action in plan.actions if isinstance(action, kind)}


def test_survivors_stay_where_the_lost_rank_has_a_snapshot():
    plan = make_plan([rank(0, 5, 4, 5), rank(1, None, 4, 5), rank(2, 5, 4)])
    assert plan.step == 5
    assert actions(plan, Restore) == {1: Restore(rank=Rank(1), step=Step(5))}
    assert {number: action.own for number, action in actions(plan, Settle).items()} == {
        0: Own.CAPTURED,
        1: Own.SNAPSHOT,
        2: Own.CAPTURED,
    }


def test_all_go_back_to_the_newest_step_that_all_can_be_at():
    plan = make_plan([rank(0, 6, 5, 6), rank(1, None, 4, 5), rank(2, 5, 4, 5)])
    assert plan.step == 5
    assert [*actions(plan, Restore)] == [0, 1]
    assert "rank 0 had gone on" in plan.reason


def test_an_update_that_was_begun_is_overwritten():
    plan = make_plan([rank(0, 5, 4, 5, updated=Indices.span(2)), rank(1, None, 5)])
    assert plan.step == 5 and [*actions(plan, Restore)] == [0, 1]
    assert "rank 0 had begun to update" in plan.reason


def test_nobody_lost_anything():
    plan = make_plan([rank(0, 5, 4, 5), rank(1, 5, 4)])
    assert plan.step == 5 and not actions(plan, Restore)


def test_a_replica_stands_in_for_a_snapshot_that_is_gone():
    """HSDP: ranks 0 and 2 hold the same part, so do 1 and 3."""
    lost = rank(2, None, place="a", own_steps=(Step(5),))
    plan = make_plan([rank(0, 5, 5, place="a"), rank(1, 5, 5, place="b"), lost, rank(3, 5, 5, place="b")])
    assert actions(plan, Copy) == {2: Copy(rank=Rank(2), sources=(Rank(0),), step=Step(5), params=None, staged=False)}
    assert actions(plan, Settle)[2].own is Own.PREDECESSOR
    assert "a replica of rank 2 lives" in plan.reason


def test_own_memory_is_cheaper_than_a_replica():
    lost = rank(2, None, 5, place="a", own_steps=(Step(5),))
    plan = make_plan([rank(0, 5, 5, place="a"), rank(1, 5, 5, place="b"), lost, rank(3, 5, 5, place="b")])
    assert not actions(plan, Copy) and [*actions(plan, Restore)] == [2]


def test_many_replicas_are_cheaper_than_a_slow_memory():
    lost = rank(6, None, 5, place="a", own_steps=(Step(5),))
    plan = make_plan([*(rank(number, 5, 5, place="a") for number in range(6)), lost])
    assert actions(plan, Copy)[6].sources == tuple(range(6))


def test_another_hosts_memory_has_what_a_lost_host_had():
    kept = ((Rank(2), Step(4), 0), (Rank(2), Step(5), 0))
    holdings = [rank(0, 6, 5, 6, node=0, kept=kept), rank(1, 6, 5, 6, node=1), rank(2, None, node=7)]
    plan = make_plan(holdings)
    assert plan.step == 5
    assert actions(plan, Restore)[2] == Restore(rank=Rank(2), step=Step(5), node=0)
    assert actions(plan, Restore)[0].node is None
    assert "another host's memory has the part of rank 2" in plan.reason
    assert "restore  rank 2: the snapshot of step 5 from the memory of host 0" in plan.lines()


def test_what_cannot_be_had_from_one_host_is_had_from_another():
    kept = ((Rank(2), Step(5), 0),)
    holdings = [rank(0, 5, 5, node=0, kept=kept), rank(1, 5, 5, node=1, kept=kept)]
    lost = rank(2, None, node=7, refused=((Step(5), 0),))
    assert actions(make_plan([*holdings, lost]), Restore)[2].node == 1
    with pytest.raises(Unrecoverable, match="the state of rank 2 is lost"):
        make_plan([*holdings, rank(2, None, node=7, refused=((Step(5), 0), (Step(5), 1)))])


def test_the_own_host_may_keep_what_a_rank_had_elsewhere():
    """A rank that has moved to the host that keeps its snapshots."""
    kept = ((Rank(2), Step(5), 0),)
    holdings = [rank(0, 5, 5, node=0, kept=kept), rank(1, 5, node=1, kept=kept), rank(2, None, node=1)]
    assert actions(make_plan(holdings), Restore)[2].node == 1


def test_a_replica_without_the_own_state_does_not_help():
    """Random numbers and data are the lost rank's own: the replica has others."""
    plan = make_plan([rank(0, 5, 4, 5, place="a"), rank(1, None, 4, place="a")])
    assert plan.step == 4


def test_what_is_lost_is_said():
    with pytest.raises(Unrecoverable, match=r"the state of ranks 1, 2 is lost: no replica of it lives"):
        make_plan([rank(0, 5, 5), rank(1, None), rank(2, None)])
    with pytest.raises(
        Unrecoverable, match=r"no step at which every rank could go on \(rank 0: \[5, 6\]; rank 1: \[4\]"
    ):
        make_plan([rank(0, 6, 5), rank(1, None, 4)])


def test_the_step_is_the_newest_common_one_for_all_combinations():
    """Three ranks, each alive at step 2 or 3 or lost, with every set of snapshots of steps 1 to 3."""
    sets = [snapshots for size in range(3) for snapshots in itertools.combinations((1, 2, 3), size)]
    states = [(step, snapshots) for step in (2, 3, None) for snapshots in sets]
    for combination in itertools.combinations_with_replacement(states, 3):
        if all(step is None for step, _ in combination):
            continue
        reachable = [{*snapshots, *([] if step is None else [step])} for step, snapshots in combination]
        common = set.intersection(*reachable)
        holdings = [rank(number, step, *snapshots) for number, (step, snapshots) in enumerate(combination)]
        if not common:
            with pytest.raises(Unrecoverable):
                make_plan(holdings)
            continue
        plan = make_plan(holdings)
        assert plan.step == max(common)
        moved = {number for number, (step, _) in enumerate(combination) if step != plan.step}
        assert {*actions(plan, Restore)} == moved
        assert {*actions(plan, Settle)} == {0, 1, 2}
