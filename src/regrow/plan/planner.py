"""Choose what each rank must do to go on together. Pure: no clock, no sockets, no torch.

The order of preference: roll forward from a survivor that completed the step; else, parameter by parameter, an exact
copy from a survivor that had not yet updated it; else undo. Replacements then copy everything, from all survivors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan.actions import Action, Copy, Own, Plan, Settle, Undo, name_ranks
from regrow.plan.holdings import Holding
from regrow.plan.offers import Offer, Offers
from regrow.plan.ranges import Indices
from regrow.rules import Source

_NO_SNAPSHOTS = (Offer(sources=(Source.MEMORY,), plan=None, why_not="no snapshots of replicated state are taken"),)


def replica_offers(holdings: Sequence[Holding]) -> Offers:
    """Return what a world can offer in which all ranks are replicas of each other: a copy from a living one."""
    sources = (Source.REPLICA,) if any(holding.fresh for holding in holdings) else ()
    try:
        return [Offer(sources=sources, plan=plan_replicas(holdings)), *_NO_SNAPSHOTS[: len(sources)]], ""
    except Unrecoverable as error:
        why = str(error)
        return [Offer(sources=sources, plan=None, why_not=why), *_NO_SNAPSHOTS[: len(sources)]], why


def plan_replicas(holdings: Sequence[Holding]) -> Plan:
    """Return the plan for these holdings, one per rank of a world in which all ranks are replicas of each other.

    Raises:
        Unrecoverable: nothing that still exists can bring the ranks to one step.
        ValueError: the ranks do not train the same model.
    """
    ranks = sorted(holdings, key=lambda holding: holding.rank)
    survivors = [holding for holding in ranks if not holding.fresh]
    if not survivors:
        raise Unrecoverable("every rank is a replacement: no one holds the training state any more")
    check_same_layout(ranks)
    check_replicas(survivors)
    steps = sorted({holding.step for holding in survivors if holding.step is not None})
    oldest, newest = steps[0], steps[-1]
    if newest > oldest + 1:
        raise Unrecoverable(
            f"survivors stand at steps {steps}: ranks that do not meet in a collective in every step are not replicas"
        )
    if newest > oldest:
        return _roll_forward(ranks, survivors, newest)
    return _retry(ranks, survivors, newest)


def check_same_layout(ranks: Sequence[Holding]) -> None:
    """Refuse replicas that have different parameters."""
    first = ranks[0]
    for other in ranks[1:]:
        if (other.params, other.layout) != (first.params, first.layout):
            raise ValueError(
                f"rank {other.rank} protects other parameters than rank {first.rank} "
                f"({other.params} against {first.params}, layouts {other.layout} and {first.layout}): "
                "every rank must build the same model and optimizer before run.steps()"
            )


def check_replicas(survivors: Sequence[Holding]) -> None:
    """Refuse replicas that stand at the same step with different parameters."""
    seen: dict[Step, Holding] = {}
    for holding in survivors:
        if holding.step is None or holding.checksum is None:
            continue
        first = seen.setdefault(holding.step, holding)
        if first.checksum != holding.checksum:
            raise Unrecoverable(
                f"ranks {first.rank} and {holding.rank} hold different parameters at step {holding.step}: they are no "
                "replicas of each other, so a lost rank cannot be rebuilt from them"
            )


def _roll_forward(ranks: Sequence[Holding], survivors: Sequence[Holding], step: Step) -> Plan:
    """Someone completed the step that others were interrupted in: its result exists, so everyone takes it."""
    complete = [holding for holding in survivors if holding.step == step]
    set_back = [holding.rank for holding in survivors if holding.step != step and holding.set_back]
    if set_back:
        raise Unrecoverable(
            f"{name_ranks(set_back)} had gone back to step {step - 1}, which others have completed: nobody knows what "
            "random numbers they would have drawn there"
        )
    begun = [holding.rank for holding in complete if holding.updated]
    if begun:
        # Updating in step t+1 needs every rank's gradient of step t+1, hence every rank's completed step t.
        raise Unrecoverable(f"ranks {begun} updated parameters in a step that other ranks had not reached")
    behind = [holding for holding in survivors if holding.step != step]
    sources = tuple(holding.rank for holding in complete)
    actions: list[Action] = [
        Copy(rank=holding.rank, sources=sources, step=step, params=None, staged=True) for holding in behind
    ]
    actions += _copies_to_replacements(ranks, sources, step)
    settled, warnings = _settle(ranks, step)
    who = name_ranks([holding.rank for holding in complete])
    laggards = name_ranks([holding.rank for holding in behind])
    return Plan(
        step=step,
        reason=f"{who} completed step {step - 1}, {laggards} did not: the finished result is copied, not recomputed",
        actions=(*actions, *settled),
        warnings=warnings,
    )


def _settle(ranks: Sequence[Holding], step: Step) -> tuple[list[Action], tuple[str, ...]]:
    """Say where each rank's own small state comes from, and warn where it may miss the end of the last step."""
    actions: list[Action] = []
    warnings: list[str] = []
    steady = all(holding.steady for holding in ranks if holding.step == step)
    for holding in ranks:
        own = own_at(holding, step)
        if own in (Own.CURRENT, Own.PREDECESSOR_LIVE) and not steady:
            warnings.append(
                f"rank {holding.rank}: the script draws random numbers or writes buffers after a step's last "
                "collective; those are lost, so the result may differ from the undisturbed run's"
            )
        actions.append(Settle(rank=holding.rank, step=step, own=own))
    return actions, tuple(warnings)


def own_at(holding: Holding, step: Step) -> Own:
    """Say where a rank's own small state at the start of ``step`` comes from."""
    if not holding.fresh:
        return Own.CAPTURED if holding.step == step else Own.CURRENT
    if step in holding.own_steps:
        return Own.PREDECESSOR
    if holding.live_step == step - 1:
        return Own.PREDECESSOR_LIVE
    raise Unrecoverable(
        f"rank {holding.rank}: the random state and buffers that its predecessor left for step {step} are gone "
        f"(there: {sorted(holding.own_steps)})"
    )


def _retry(ranks: Sequence[Holding], survivors: Sequence[Holding], step: Step) -> Plan:
    """No one completed the step: every parameter goes back to the step's start, by the cheapest exact way."""
    everyone = Indices.span(survivors[0].params)
    touched = Indices.of(index for holding in survivors for index in holding.updated)
    untouched = everyone - touched
    actions: list[Action] = []
    copied: dict[tuple[tuple[Rank, ...], Rank], list[int]] = defaultdict(list)
    undone: dict[Rank, list[int]] = defaultdict(list)
    copies, undoes = 0, 0
    for index in touched:
        clean = tuple(holding.rank for holding in survivors if index not in holding.updated)
        dirty = [holding for holding in survivors if index in holding.updated]
        if clean:
            copies += 1
            for holding in dirty:
                copied[clean, holding.rank].append(index)
            continue
        undoes += 1
        able = [holding for holding in dirty if index in holding.undoable]
        if not able:
            whys = "; ".join(sorted({holding.why_not for holding in dirty if holding.why_not})) or "no record was kept"
            raise Unrecoverable(f"parameter {index} was updated by every survivor and cannot be taken back: {whys}")
        best = [holding for holding in able if holding.exact] or able
        for holding in best:
            undone[holding.rank].append(index)
        for holding in dirty:
            if holding not in best:
                copied[tuple(able.rank for able in best), holding.rank].append(index)
    exactness = {holding.rank: holding.exact for holding in survivors}
    for rank in sorted(undone):
        actions.append(Undo(rank=rank, to_step=step, params=Indices.of(undone[rank]), exact=exactness[rank]))
    for (sources, rank), indices in sorted(copied.items(), key=lambda item: (item[0][1], item[0][0])):
        actions.append(Copy(rank=rank, sources=sources, step=step, params=Indices.of(indices), staged=True))
    actions += _copies_to_replacements(ranks, tuple(holding.rank for holding in survivors), step)
    settled, warnings = _settle(ranks, step)
    if not all(exactness[rank] for rank in undone):
        warnings += ("the undo is arithmetic: parameters and optimizer state are within a few ulp, not bit-identical",)
    if not touched:
        reason = f"no survivor had updated anything in step {step}: it runs again"
    else:
        reason = (
            f"step {step} was half applied and runs again: {len(untouched)} parameters untouched, "
            f"{copies} copied from a survivor that had not updated them, {undoes} undone since every survivor had"
        )
    return Plan(step=step, reason=reason, actions=(*actions, *settled), warnings=warnings)


def _copies_to_replacements(ranks: Sequence[Holding], sources: tuple[Rank, ...], step: Step) -> list[Action]:
    return [
        Copy(rank=holding.rank, sources=sources, step=step, params=None, staged=False)
        for holding in ranks
        if holding.fresh
    ]
