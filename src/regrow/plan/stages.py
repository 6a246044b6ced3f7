"""Choose where each stage of a pipeline goes on. Pure: no clock, no sockets, no torch.

Ranks of one stage are replicas of each other; a stage without a living replica goes back to its checkpoint and does its
lost steps again, over what the other stages sent it then. So ranks may go on at different steps. What makes such
positions possible together: whoever goes on at an earlier step than another finds what that one has sent it since in
that one's journal. Possible positions can be combined rank by rank to the later of the two, so there is one latest
combination; it is found by lowering, from the latest that each stage could have alone, whatever stands in the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan.actions import Action, Copy, Load, Own, Plan, Replay, Settle, Undo, name_ranks
from regrow.plan.holdings import Holding
from regrow.plan.offers import Offer, Offers
from regrow.plan.planner import check_replicas, check_same_layout, own_at
from regrow.rules import Source

Stages = Mapping[int, Sequence[Holding]]
WORTH_SHARING = 3
"""How many steps must be lost: the first one is done alone, to see what a micro-batch does."""


def stage_offers(holdings: Sequence[Holding]) -> Offers:
    """Return what the stages of a pipeline can offer: each source alone for all lost ranks, and the best of all.

    Raises:
        ValueError: replicas do not train the same model, or some ranks named their stage and others did not.
    """
    ranks = sorted(holdings, key=lambda holding: holding.rank)
    if any(holding.stage is None for holding in ranks):
        raise ValueError("some ranks gave protect(stage=...) and others did not: give it on all of them, or on none")
    stages: dict[int, list[Holding]] = {}
    for holding in ranks:
        stages.setdefault(_stage(holding), []).append(holding)
    for members in stages.values():
        check_same_layout(members)
        check_replicas([holding for holding in members if not holding.fresh])
    latest, why = _latest(stages, ranks, None)
    natural = None if latest is None else _sources(latest, ranks)
    found: list[Offer] = []
    if natural == ():
        found.append(Offer(sources=(), plan=latest))
    for source in (Source.REPLICA, Source.REPLAY) if any(holding.fresh for holding in ranks) else ():
        plan = latest
        if natural != (source,):
            plan, _ = _latest(stages, ranks, source)
        there = plan is not None and _sources(plan, ranks) == (source,)
        found.append(
            Offer(sources=(source,), plan=plan if there else None, why_not="" if there else _why_not(source, stages))
        )
    found.append(_rollback(stages, ranks, latest if natural == (Source.ROLLBACK,) else None))
    if natural is not None and len(natural) > 1:
        found.append(Offer(sources=natural, plan=latest))
    return found, why


def _latest(stages: Stages, ranks: Sequence[Holding], only: Source | None) -> tuple[Plan | None, str]:
    """Return the plan of the latest positions, or why there are none; ``only``: for stages that have lost a rank."""
    left: dict[int, list[Step]] | None = None
    if only is not None:
        left = {}
        for stage, members in stages.items():
            choice = candidates(members)
            if any(holding.fresh for holding in members):
                choice = alive(members) if only is Source.REPLICA else saved(members)
            left[stage] = choice
    try:
        positions = latest_positions(stages, left)
    except Unrecoverable as error:
        return None, str(error)
    return _plan(stages, [positions[_stage(holding)] for holding in ranks]), ""


def _rollback(stages: Stages, ranks: Sequence[Holding], natural: Plan | None) -> Offer:
    common = set.intersection(*({*holding.checkpoints} for holding in ranks))
    if natural is not None:
        return Offer(sources=(Source.ROLLBACK,), plan=natural)
    if not common:
        why = "there is no step of which every stage has a checkpoint"
        return Offer(sources=(Source.ROLLBACK,), plan=None, why_not=why)
    step = Step(max(common))
    plan = _plan(stages, [step] * len(ranks), reason=f"all go back to the stages' checkpoints of step {step}")
    return Offer(sources=(Source.ROLLBACK,), plan=plan)


def _sources(plan: Plan, ranks: Sequence[Holding]) -> tuple[Source, ...]:
    """Return where the lost ranks get their state from."""
    lost = {holding.rank for holding in ranks if holding.fresh}
    loaded = {action.rank for action in plan.actions if isinstance(action, Load)}
    copied = {action.rank for action in plan.actions if isinstance(action, Copy)}
    if lost and len(loaded) == len(ranks) and len({*plan.positions}) == 1:
        return (Source.ROLLBACK,)
    return (*([Source.REPLICA] if lost & copied else []), *([Source.REPLAY] if lost & loaded else []))


def _why_not(source: Source, stages: Stages) -> str:
    """Say why the lost ranks cannot all have their state from there."""
    hit = [members for members in stages.values() if any(holding.fresh for holding in members)]
    lacking = [members for members in hit if not (alive if source is Source.REPLICA else saved)(members)]
    lost = name_ranks(sorted(holding.rank for members in lacking or hit for holding in members if holding.fresh))
    if source is Source.REPLICA:
        return f"no living replica of {lost} fits what the other stages hold"
    if lacking:
        return f"{lost} has no checkpoint on its storage" if len(lacking) == 1 else f"{lost} have no checkpoints"
    return f"what was sent to {lost} since its checkpoint is not in all journals"


def _stage(holding: Holding) -> int:
    assert holding.stage is not None
    return holding.stage


# where to go on ------------------------------------------------------------------------------------------------------


def candidates(members: Sequence[Holding]) -> list[Step]:
    """Return the steps at which a stage could go on by itself, the latest first."""
    return sorted({*alive(members), *saved(members)}, reverse=True)


def alive(members: Sequence[Holding]) -> list[Step]:
    """Return those at which a living replica stands, and the others of the stage could take its state."""
    held = {holding.step for holding in members if holding.step is not None and _intact(holding)}
    return sorted((step for step in held if all(_can_copy(holding, step) for holding in members)), reverse=True)


def saved(members: Sequence[Holding]) -> list[Step]:
    """Return those of which all of the stage have a checkpoint."""
    return sorted(set.intersection(*({*holding.checkpoints} for holding in members)), reverse=True)


def _intact(holding: Holding) -> bool:
    """Whether a survivor can still be at the start of its step: what that step has updated can be taken back."""
    return not holding.updated - holding.undoable


def _can_copy(holding: Holding, step: Step) -> bool:
    """Whether a rank could take a replica's state at this step: its own random numbers and buffers must be known."""
    if holding.fresh:
        return step in holding.own_steps or holding.live_step == step - 1
    behind = holding.step == step - 1 and not holding.set_back
    return behind or (holding.step == step and _intact(holding))


def latest_positions(stages: Stages, choice: Mapping[int, Sequence[Step]] | None = None) -> dict[int, Step]:
    """Return the latest positions, by stage, that are possible together.

    ``choice``: where each could go on by itself, the latest first; ``None``: wherever it can.
    """
    left: dict[int, Sequence[Step]] = {stage: candidates(members) for stage, members in stages.items()}
    left |= choice or {}
    missing = _missing_from(stages)
    while True:
        for stage, steps in left.items():
            if not steps:
                raise Unrecoverable(_why_none(stage, stages[stage]))
        position = {stage: steps[0] for stage, steps in left.items()}
        lowered = False
        for stage, behind, ahead, receiver in _apart(stages, position):
            if _served(ahead, receiver, behind, position[stage], missing):
                continue
            left[stage] = left[stage][1:]
            lowered = True
            break
        if not lowered:
            return position


def _apart(stages: Stages, position: Mapping[int, Step]) -> Iterator[tuple[int, Step, Holding, Holding]]:
    """Yield every pair of ranks of which one goes on at an earlier step: (stage ahead, that step, ahead, behind)."""
    for stage, members in stages.items():
        for other, others in stages.items():
            if position[other] < position[stage]:
                for ahead in members:
                    for behind in others:
                        yield stage, position[other], ahead, behind


def _served(ahead: Holding, behind: Holding, since: Step, upto: Step, missing: Mapping[Rank, Step]) -> bool:
    """Whether the one ahead has in its journal what it sent to the one behind from one step on, and before another."""
    kept = ahead.recent_from if ahead.domain == behind.domain else ahead.journal_from
    if ahead.step is None or ahead.step < upto - 1 or kept is None or since < kept:
        return False
    # Who stands one step before, and copies a replica's state, has most likely sent all of that step: its replica could
    # not have completed it otherwise. If something is missing after all, the journal says so, and this is planned anew.
    damaged = missing.get(ahead.rank)
    return damaged is None or since > damaged


def _missing_from(stages: Stages) -> dict[Rank, Step]:
    """Return the last step of each journal that somebody found damaged."""
    found: dict[Rank, Step] = {}
    for members in stages.values():
        for holding in members:
            for rank, step in holding.damaged:
                found[rank] = max(step, found.get(rank, step))
    return found


def _why_none(stage: int, members: Sequence[Holding]) -> str:
    lost = [holding.rank for holding in members if holding.fresh]
    whys = "; ".join(sorted({holding.why_not for holding in members if holding.why_not and not _intact(holding)}))
    saved = sorted({*members[0].checkpoints}.intersection(*(holding.checkpoints for holding in members[1:])))
    return (
        f"stage {stage} ({name_ranks([holding.rank for holding in members])}) cannot go on: "
        + (f"{name_ranks(lost)} lost, " if lost else "")
        + (f"an update cannot be taken back ({whys}), " if whys else "")
        + f"and none of its checkpoints (of steps {saved}) fits what the other stages hold"
        if saved
        else f"stage {stage} ({name_ranks([holding.rank for holding in members])}) cannot go on: no living replica "
        "holds its state, and it has no checkpoint on its storage"
    )


# what to do ----------------------------------------------------------------------------------------------------------


def _plan(stages: Stages, positions: Sequence[Step], *, reason: str = "") -> Plan:
    actions: list[Action] = []
    settled: list[Action] = []
    warnings: list[str] = []
    newest = max(positions)
    loaded: list[Rank] = []
    for members in stages.values():
        step = positions[members[0].rank]
        at = [holding for holding in members if holding.step == step and _intact(holding)]
        sources = tuple(holding.rank for holding in at)
        for holding in members:
            own = Own.CHECKPOINT
            if holding in at:
                own = Own.CAPTURED
                if holding.updated:
                    actions.append(Undo(rank=holding.rank, to_step=step, params=holding.updated, exact=holding.exact))
                    if not holding.exact:
                        warnings.append(f"rank {holding.rank}: the undo is arithmetic, within a few ulp")
            elif sources and _can_copy(holding, step):
                own = own_at(holding, step)
                actions.append(
                    Copy(rank=holding.rank, sources=sources, step=step, params=None, staged=not holding.fresh)
                )
            else:
                loaded.append(holding.rank)
                actions.append(Load(rank=holding.rank, step=step))
            settled.append(Settle(rank=holding.rank, step=step, own=own))
            ahead = tuple(Rank(rank) for rank, other in enumerate(positions) if other > step)
            if ahead:
                helpers, alone_from = _helpers(holding, stages, positions)
                actions.append(
                    Replay(
                        rank=holding.rank,
                        first=step,
                        last=Step(newest - 1),
                        sources=ahead,
                        helpers=helpers,
                        alone_from=alone_from,
                    )
                )
    actions.sort(key=_order)
    settled.sort(key=lambda action: action.rank)
    return Plan(
        step=newest,
        reason=reason or _reason(stages, positions, loaded),
        actions=(*actions, *settled),
        warnings=tuple(warnings),
        positions=tuple(positions),
    )


def _helpers(behind: Holding, stages: Stages, positions: Sequence[Step]) -> tuple[tuple[Rank, ...], Step | None]:
    """Return who computes micro-batches of a replay, and from which step on it goes on alone.

    All others, if all are ahead: they have nothing to do until it has caught up with the first of them, and all that it
    receives is in journals, so that its micro-batches can be computed in any order. Not worth it for a step or two.
    """
    step = positions[behind.rank]
    alone_from = min((other for rank, other in enumerate(positions) if rank != behind.rank), default=step)
    if not behind.shares or len(stages[_stage(behind)]) > 1 or alone_from - step < WORTH_SHARING:
        return (), None
    everyone = sorted((holding for members in stages.values() for holding in members), key=lambda each: each.rank)
    return tuple(each.rank for each in everyone if each.rank != behind.rank and each.shares), alone_from


def _order(action: Action) -> tuple[int, int]:
    return (Undo, Copy, Load, Replay, Settle).index(type(action)), action.rank


def _reason(stages: Stages, positions: Sequence[Step], loaded: Sequence[Rank]) -> str:
    newest = max(positions)
    everyone = [holding for members in stages.values() for holding in members]
    lost = sorted(holding.rank for holding in everyone if holding.fresh)
    back = sorted(
        holding.rank for holding in everyone if holding.step is not None and positions[holding.rank] < holding.step
    )
    behind = sorted(
        holding.rank for holding in everyone if positions[holding.rank] < newest and holding.rank not in loaded
    )
    copied = [rank for rank in lost if rank not in loaded]
    parts = []
    if copied:
        parts.append(f"a replica of {name_ranks(copied)} lives, which is cheaper to copy than to compute again")
    alone = sorted({*loaded} - {*back})
    if alone:
        parts.append(
            ("" if {*alone} - {*lost} else f"no replica of {name_ranks(alone)} lives: ")
            + "the lost steps are computed again from what the other stages have sent"
            + ("" if back else "; they keep their state")
        )
    if back:
        parts.append(
            f"{name_ranks(back)} must go back, too: what was sent from there since is in no journal, or is damaged"
        )
    if behind:
        parts.append(f"{name_ranks(behind)} had not completed step {newest - 1}, others had")
    return "; ".join(parts) if parts else f"nobody's state was lost: step {newest} runs again"
