"""What is put back where nothing exact is left, what the others keep, and what that is said to cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan import Copy, Holding, Indices, Keep, Own, Patch, Restore, Running, Settle, make_plan
from regrow.plan.partial import plan_partial
from regrow.plan.perturbation import cost_bound
from regrow.rules import Rules

APPROXIMATE = Rules(approximate=True)
SHRINKING = tuple((at, 0.9**at) for at in range(2, 42, 2))
"""How far a part moves in a step that shrinks by 0.9 each."""


def alive(number: int, step: int, *, own: tuple[int, ...] = (), **more) -> Holding:
    running = Running(
        own_steps=tuple(Step(at) for at in (*own, step)),
        period=2,
        speeds=more.pop("speeds", SHRINKING),
        moved=((2, 4.0),),
        looked_at=40,
    )
    fields = {"params": 4, "layout": "same", "place": f"part {number}", "running": running}
    return Holding(rank=Rank(number), step=Step(step), **{**fields, **more})


def lost(number: int, *ages: tuple[int, int, float], own: tuple[int, ...] = (), **more) -> Holding:
    fields = {
        "params": 4,
        "layout": "same",
        "place": f"part {number}",
        "own_steps": tuple(Step(at) for at in own),
        "running": Running(ages=ages, period=2),
    }
    return Holding(rank=Rank(number), step=None, **{**fields, **more})


def actions(plan, kind):
    return {action.rank: action for action in plan.actions if isinstance(action, kind)}


def owns(plan):
    return {number: action.own for number, action in actions(plan, Settle).items()}


def test_only_what_was_lost_goes_back():
    ranks = [alive(0, 42), lost(1, (36, 1, 1.0), (40, 3, 4.0), own=(41, 42)), alive(2, 42)]
    plan = make_plan(ranks, APPROXIMATE)
    assert plan.step == 42 and plan.approximate
    assert [*actions(plan, Patch).values()] == [Patch(rank=Rank(1), step=Step(42), blocks=4, oldest=6, median=2)]
    assert sorted(actions(plan, Keep)) == [0, 2] and not actions(plan, Copy)
    assert owns(plan) == {0: Own.CAPTURED, 1: Own.LEFT, 2: Own.CAPTURED}
    said = "\n".join(plan.lines())
    assert "patch    rank 1: 4 blocks from the running checkpoint, 2 steps old in the median, 6 at the most" in said
    assert "keep     ranks 0, 2: live parameters and optimizer state, of step 42" in said
    assert "warning  the result will not be the undisturbed run's" in said


def test_it_is_never_chosen_unless_it_was_allowed():
    ranks = [alive(0, 42), lost(1, (40, 3, 4.0), own=(42,)), alive(2, 42)]
    with pytest.raises(Unrecoverable, match="the state of rank 1 is lost"):
        make_plan(ranks)
    on_disk = [replace(holding, disk=(Step(30),)) for holding in ranks]
    assert make_plan(on_disk).step == 30
    assert make_plan(on_disk, APPROXIMATE).step == 42
    unsaid = [*ranks[:2], replace(ranks[2], running=None)]
    with pytest.raises(Unrecoverable):
        make_plan(unsaid, APPROXIMATE)


def test_an_exact_source_comes_first():
    kept = (Step(41), 0), (Step(42), 0)
    plan = make_plan([alive(0, 42), lost(1, (40, 3, 4.0), own=(42,), snapshots=kept), alive(2, 42)], APPROXIMATE)
    assert plan.step == 42 and not plan.approximate


def test_the_cost_is_the_theorems_with_the_c_that_was_fitted():
    plan = make_plan([alive(0, 40), lost(1, (36, 1, 0.25), own=(40,))], APPROXIMATE)
    assert plan.cost is not None and plan.cost.fit.c == pytest.approx(0.9)
    norm = 4 * 0.5  # four steps at a speed of a half
    left = math.hypot(2.0 / (0.9**-2 - 1), 0.5 / (1 / 0.9 - 1))
    assert plan.cost.expected == pytest.approx(cost_bound([(0, norm)], distance=left, c=0.9))
    assert plan.cost.bound == pytest.approx(plan.cost.expected)
    assert "iterations more" in plan.lines()[-2] and "c = 0.9 typically" in plan.lines()[-2]


def test_a_series_that_does_not_shrink_is_no_number():
    speeds = tuple((at, 1.1**at) for at in range(2, 42, 2))
    plan = make_plan([alive(0, 40, speeds=speeds), lost(1, (36, 1, 0.25), own=(40,))], APPROXIMATE)
    assert plan.cost is not None and plan.cost.expected is None
    assert "cost     its cost cannot be predicted: not contracting" in "\n".join(plan.lines())
    early = make_plan([alive(0, 1, speeds=()), lost(1, (0, 4, 0.0), own=(1,))], APPROXIMATE)
    assert "its cost cannot be predicted: too few points" in "\n".join(early.lines())


def test_rounds_that_were_left_out_end_the_series():
    """Values must lie equally far apart; what one of two survivors lacks is not used either."""
    first = (*((at, 50.0) for at in range(2, 12, 2)), *((at, 0.9**at) for at in range(20, 42, 2)))
    second = tuple((at, 0.9**at) for at in range(24, 42, 2))
    ranks = [alive(0, 40, speeds=first), alive(1, 40, speeds=second), lost(2, (36, 1, 0.25), own=(40,))]
    plan = make_plan(ranks, APPROXIMATE)
    assert plan.cost is not None and plan.cost.fit.points == 9 and plan.cost.fit.c == pytest.approx(0.9)


def test_all_go_on_where_everyone_knows_its_data():
    """Rank 0 has completed step 41, rank 1 had not when it was lost: rank 0 does it again."""
    plan = make_plan([alive(0, 42, own=(41,)), lost(1, (40, 4, 1.0), own=(40, 41)), alive(2, 41)], APPROXIMATE)
    assert plan.step == 41
    assert owns(plan) == {0: Own.LEFT, 1: Own.LEFT, 2: Own.CAPTURED}
    assert any("rank 0 had done step 41 already" in text for text in plan.warnings)


def test_a_step_of_another_past_is_no_place_to_go_on():
    """Ranks may have left something for steps that were given up since."""
    plan = make_plan([alive(0, 42, own=(45,)), lost(1, (40, 4, 1.0), own=(42, 45))], APPROXIMATE)
    assert plan.step == 42


def test_a_half_made_update_stays():
    plan = make_plan([alive(0, 42, updated=Indices.span(2)), lost(1, (40, 4, 1.0), own=(42,))], APPROXIMATE)
    assert plan.step == 42 and [*actions(plan, Keep)] == [0]
    assert any("rank 0: in the middle of an update" in text for text in plan.warnings)
    clean = make_plan([alive(0, 42), lost(1, (40, 4, 1.0), own=(42,))], APPROXIMATE)
    assert plan.cost is not None and clean.cost is not None
    assert plan.cost.expected > clean.cost.expected  # it is a perturbation, too


def test_what_was_left_is_gone_with_its_host():
    plan = make_plan([alive(0, 42), lost(1, (40, 4, 1.0)), alive(2, 42)], APPROXIMATE)
    assert owns(plan)[1] is Own.DONATED
    assert actions(plan, Copy)[1] == Copy(
        rank=Rank(1), sources=(Rank(0),), step=Step(42), params=Indices(), staged=False, small=True
    )
    with pytest.raises(Unrecoverable):  # stages do not all read the same data: nobody can tell it where to go on
        make_plan([stage(alive(0, 42)), stage(lost(1, (40, 4, 1.0)))], APPROXIMATE)


def stage(holding: Holding) -> Holding:
    return replace(holding, place=None, stage=int(holding.rank))


def test_a_stage_of_a_pipeline():
    plan = make_plan([stage(alive(0, 42)), stage(lost(1, (40, 4, 1.0), own=(41, 42)))], APPROXIMATE)
    assert plan.positions == (42, 42) and [*actions(plan, Patch)] == [1] and plan.approximate


def test_replicas_of_a_part_are_made_alike():
    """Ranks 0 and 2 hold one part, 1 and 3 the other, and both of those are lost: the fresher one serves for both."""
    ranks = [
        alive(0, 42, place="a", checksum=1),
        lost(1, (30, 4, 1.0), own=(42,), place="b"),
        alive(2, 42, place="a", checksum=1),
        lost(3, (40, 4, 1.0), own=(42,), place="b"),
    ]
    plan = make_plan(ranks, APPROXIMATE)
    assert [*actions(plan, Patch)] == [3]
    assert actions(plan, Copy)[1].sources == (3,) and not actions(plan, Copy)[1].staged
    assert owns(plan)[1] is Own.PREDECESSOR
    apart = [replace(ranks[0], step=Step(43), running=replace(ranks[0].running, own_steps=(Step(42),))), *ranks[1:]]
    plan = make_plan(apart, APPROXIMATE)
    copied = actions(plan, Copy)[2]
    assert plan.step == 42 and copied.sources == (0,) and copied.staged and sorted(actions(plan, Keep)) == [0]


def test_another_one_that_was_lost_has_its_snapshot():
    """Rank 2 died in the recovery of rank 1: of rank 2 there is something exact at the step at which all go on."""
    ranks = [
        alive(0, 42),
        lost(1, (40, 4, 1.0), own=(42,)),
        lost(2, (38, 4, 1.0), own=(42,), snapshots=((Step(42), 0),)),
    ]
    plan = make_plan(ranks, APPROXIMATE)
    assert [*actions(plan, Patch)] == [1] and [*actions(plan, Restore)] == [2]
    assert owns(plan) == {0: Own.CAPTURED, 1: Own.LEFT, 2: Own.SNAPSHOT}
    assert plan.cost == make_plan(ranks[:2], APPROXIMATE).cost  # it perturbs nothing


def test_ranks_that_are_no_replicas_are_not_mixed():
    ranks = [
        alive(0, 42, place="a", checksum=1),
        alive(1, 42, place="a", checksum=2),
        lost(2, (40, 4, 1.0), own=(42,), place="b"),
    ]
    assert plan_partial(ranks, "why") is None


def test_nothing_was_ever_saved():
    assert plan_partial([alive(0, 42), lost(1, own=(42,))], "why") is None
    assert plan_partial([replace(alive(0, 42), place=None), replace(lost(1, own=(42,)), place=None)], "why") is None


def test_everyone_is_lost_and_everyone_goes_back():
    plan = plan_partial([lost(0, (40, 4, 1.0), own=(41, 42)), lost(1, (40, 4, 1.0), own=(40, 41))], "why")
    assert plan is not None and plan.step == 41 and sorted(actions(plan, Patch)) == [0, 1]
    assert plan_partial([lost(0, (40, 4, 1.0), own=(41,)), lost(1, (40, 4, 1.0))], "why") is None


def test_one_that_was_just_put_back_still_costs_what_it_did():
    """The recovery was interrupted when its blocks were in place: it is a survivor in the next one."""
    first = make_plan([alive(0, 40), lost(1, (36, 1, 0.25), own=(40,))], APPROXIMATE)
    running = Running(ages=((36, 1, 0.25),), own_steps=(Step(40),), period=2)
    patched = alive(1, 40, updated=Indices.span(4))
    again = plan_partial([alive(0, 40), replace(patched, running=running)], "why")
    assert again is not None and again.cost == first.cost and not actions(again, Patch)


def test_it_travels_as_json():
    for holding in (alive(0, 42, own=(41,)), lost(1, (40, 3, 4.0), own=(42,))):
        assert Holding.from_json(holding.to_json()) == holding
