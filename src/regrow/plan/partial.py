"""Only what was lost goes back, to a running checkpoint of mixed ages; survivors keep what they have. Pure.

This is SCAR's partial recovery. The result is not the undisturbed run's, so nobody gets here who has not said
``approximate=True``. All ranks go on at one step: the newest at whose start everyone's own small state is at hand, so
that all read the same data from there on. Survivors that have done that step already keep its update, and do it again;
those that were in the middle of an update keep that, too. All of that is perturbation, as the lost blocks are, and the
plan says what it is expected to cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from regrow.ids import Rank, Step
from regrow.plan.actions import Action, Copy, Keep, Own, Patch, Plan, Restore, Settle, name_ranks
from regrow.plan.holdings import Holding
from regrow.plan.line import merged
from regrow.plan.perturbation import Cost, predict
from regrow.plan.ranges import Indices
from regrow.plan.running import Running
from regrow.plan.shards import kept_elsewhere, restores, useful

Key = int | str
Snapshots = Mapping[Rank, Mapping[Step, Restore]]
"""Those that a replacement can have. One of the step at which all go on is better than a running checkpoint."""


def plan_partial(holdings: Sequence[Holding], why: str) -> Plan | None:
    """Return the plan by which lost ranks take their blocks from their running checkpoints; ``None`` if it cannot be.

    Its ``cost`` is what that is expected to cost. ``why``: what has made it necessary.
    """
    ranks = sorted(holdings, key=lambda holding: holding.rank)
    running = {holding.rank: holding.running for holding in ranks if holding.running is not None}
    if len(running) != len(ranks):
        return None
    places: dict[Key, list[Holding]] = {}
    for holding in ranks:
        key = holding.place if holding.place is not None else holding.stage
        if key is None:
            return None  # plain replicas: if one lives it has everything, and if none does nothing is left
        places.setdefault(key, []).append(holding)
    snapshots = _snapshots(ranks)
    step = _where(ranks, running, snapshots)
    if step is None:
        return None
    exact = {rank: found[step] for rank, found in snapshots.items() if step in found}
    sources: dict[Key, list[Holding]] = {}
    for key, members in places.items():
        if not (found := _sources(members, running, exact, step)):
            return None
        sources[key] = found
    actions = [action for key in places for action in _fill(places[key], sources[key], running, exact, step)]
    actions += [
        Keep(rank=holding.rank, step=holding.step)
        for holding in ranks
        if holding.step is not None and not any(isinstance(a, Copy) and a.rank == holding.rank for a in actions)
    ]
    patched = sorted(action.rank for action in actions if isinstance(action, Patch))
    donor = min((holding.rank for holding in ranks if not holding.fresh), default=None)
    settled: list[Action] = []
    donated: list[Rank] = []
    for holding in ranks:
        own = _own(holding, step, patched, [action.rank for action in actions if isinstance(action, Restore)])
        if own is Own.DONATED:
            if donor is None:
                return None
            donated.append(holding.rank)
            nothing = Indices()
            actions.append(
                Copy(rank=holding.rank, sources=(donor,), step=step, params=nothing, staged=False, small=True)
            )
        settled.append(Settle(rank=holding.rank, step=step, own=own))
    return Plan(
        step=step,
        reason=f"{why}: approximate=True was said, so what was lost is taken from the running checkpoint, and the "
        "others keep what they have",
        actions=(*actions, *settled),
        warnings=tuple(_warnings(ranks, patched, donated, step)),
        positions=(step,) * len(ranks) if ranks[0].stage is not None else (),
        cost=_cost([members[0] for members in sources.values() if members[0].rank not in exact], running, step),
    )


# where to go on ------------------------------------------------------------------------------------------------------


def _snapshots(ranks: Sequence[Holding]) -> Snapshots:
    line = merged(holding.line for holding in ranks)
    there = [useful(holding, line) for holding in ranks]
    elsewhere = kept_elsewhere(there)
    return {holding.rank: restores(holding, elsewhere.get(holding.rank, {})) for holding in there if holding.fresh}


def _where(ranks: Sequence[Holding], running: Mapping[Rank, Running], snapshots: Snapshots) -> Step | None:
    """Return the newest step for which everyone's own small state is at hand.

    Of sharded state a replacement may be without: it is given another rank's, which reads the same data. The stages of
    a pipeline do not all read it.
    """
    without = [holding for holding in ranks if holding.fresh and not holding.own_steps and not snapshots[holding.rank]]
    if without and (all(holding.fresh for holding in ranks) or any(holding.place is None for holding in without)):
        return None
    common = set.intersection(
        *(
            {*holding.own_steps, *snapshots[holding.rank]}
            if holding.step is None
            else {holding.step, *(other for other in running[holding.rank].own_steps if other < holding.step)}
            for holding in ranks
            if holding not in without
        )
    )
    return max(common) if common else None


def _own(holding: Holding, step: Step, patched: Sequence[Rank], restored: Sequence[Rank]) -> Own:
    if not holding.fresh:
        return Own.CAPTURED if holding.step == step else Own.LEFT
    if holding.rank in restored:
        return Own.SNAPSHOT
    if step not in holding.own_steps:
        return Own.DONATED
    return Own.LEFT if holding.rank in patched else Own.PREDECESSOR


# what to take from where ---------------------------------------------------------------------------------------------


def _sources(
    members: Sequence[Holding], running: Mapping[Rank, Running], exact: Mapping[Rank, Restore], step: Step
) -> list[Holding]:
    """Return whose state all ranks of one place are to have: that of survivors that agree, or one that is put back."""
    alive = [holding for holding in members if not holding.fresh]
    whole = [holding for holding in alive if not holding.updated]
    if whole:
        newest = max(holding.step for holding in whole if holding.step is not None)
        found = [holding for holding in whole if holding.step == newest]
        return found if len({holding.checksum for holding in found}) == 1 else []  # no replicas: not to be mixed
    if alive:
        return [max(alive, key=lambda holding: (holding.step or 0, -holding.rank))]
    if restored := [holding for holding in members if holding.rank in exact]:
        return restored[:1]
    saved = [holding for holding in members if running[holding.rank].blocks]
    return sorted(saved, key=lambda holding: sum(running[holding.rank].stale(step)))[:1]


def _fill(
    members: Sequence[Holding],
    sources: Sequence[Holding],
    running: Mapping[Rank, Running],
    exact: Mapping[Rank, Restore],
    step: Step,
) -> list[Action]:
    actions: list[Action] = []
    ranks = tuple(holding.rank for holding in sources)
    for holding in members:
        if holding.rank not in ranks:
            actions.append(Copy(rank=holding.rank, sources=ranks, step=step, params=None, staged=not holding.fresh))
        elif holding.rank in exact:
            actions.append(exact[holding.rank])
        elif holding.fresh:
            stale = running[holding.rank].stale(step)
            actions.append(
                Patch(
                    rank=holding.rank,
                    step=step,
                    blocks=len(stale),
                    oldest=stale[0],
                    median=stale[(len(stale) - 1) // 2],
                )
            )
    return actions


# what it costs -------------------------------------------------------------------------------------------------------


def _cost(ones: Sequence[Holding], running: Mapping[Rank, Running], step: Step) -> Cost:
    """Predict it from one rank of each place: what they hold together is the whole state."""
    squared = 0.0
    moved: list[tuple[float, int]] = []
    for holding in ones:
        mine = running[holding.rank]
        if mine.ages:
            squared += sum(speed2 * max(step - at, 0) ** 2 for at, _, speed2 in mine.ages)
            moved.append((math.sqrt(sum(speed2 for *_, speed2 in mine.ages)), 1))
            continue
        moved += [(math.sqrt(far2), iterations) for iterations, far2 in mine.moved]
        if mine.speeds and (holding.updated or holding.step != step):
            squared += mine.speeds[-1][1] ** 2  # about one update more than the others
    alive = [running[holding.rank] for holding in ones if not running[holding.rank].ages]
    period = max((each.period for each in alive), default=1)
    looked_at = max((each.looked_at for each in alive), default=step)
    speeds = _together((each.speeds for each in alive), period)
    return predict(math.sqrt(squared), moved, max(step - looked_at, 0), speeds, period)


def _together(series: Iterable[Sequence[tuple[int, float]]], period: int) -> list[float]:
    """Return how fast the survivors' parts have moved together, at the last rounds that all of them have in a row."""
    found = [{at: speed for at, speed in rows if math.isfinite(speed)} for rows in series]
    found = [rows for rows in found if rows]  # one that was put back lately knows nothing yet
    if not found:
        return []
    common = sorted(set.intersection(*({*rows} for rows in found)), reverse=True)
    last = [at for number, at in enumerate(common) if at == common[0] - number * period]
    return [math.sqrt(sum(rows[at] ** 2 for rows in found)) for at in reversed(last)]


def _warnings(ranks: Sequence[Holding], patched: Sequence[Rank], alone: Sequence[Rank], step: Step) -> list[str]:
    said = ["the result will not be the undisturbed run's: older values are a perturbation that training works off"]
    again = [holding.rank for holding in ranks if holding.step is not None and holding.step > step]
    if again:
        said.append(f"{name_ranks(again)} had done step {step} already: its update stays, and is made a second time")
    begun = [holding.rank for holding in ranks if holding.updated]
    if begun:
        said.append(f"{name_ranks(begun)}: in the middle of an update, or put back a moment ago; what is there stays")
    if alone:
        said.append(
            f"{name_ranks(alone)}: what was left of their own is gone; a survivor's buffers, new random numbers"
        )
    if not patched:
        said.append("no block is taken from a running checkpoint: replicas are made alike again")
    return said
