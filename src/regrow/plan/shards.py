"""Choose where ranks of sharded state go on. Pure: no clock, no sockets, no torch.

Each rank holds a part of the state that may be nowhere else; snapshots of it lie in the memory of its host and of
others. All ranks go on at one step at which every one of them can be: since it stands there, or has a snapshot of it,
or has a replica (HSDP) that stands there. It is the newest one, unless what must be moved for it takes longer than to
do the steps again from an older one. Only what lies on one line counts (``line``): a host that comes back may have
snapshots of steps that the others have done again since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan.actions import Action, Copy, Own, Plan, Restore, Settle, name_ranks
from regrow.plan.holdings import Holding
from regrow.plan.line import Line, lies_on, merged
from regrow.plan.offers import Offer, Offers
from regrow.plan.planner import check_replicas, check_same_layout
from regrow.plan.prices import Prices
from regrow.rules import Source

Places = Mapping[str, Sequence[Holding]]
ORDER = (Source.MEMORY, Source.PEER, Source.REPLICA)
"""Of two that cost the same, the first is taken."""


@dataclass(frozen=True)
class Way:
    """How a rank could come to the start of a step."""

    source: Source | None
    """``None``: it stands there."""
    seconds: float
    actions: tuple[Action, ...]


Ways = Mapping[Step, Sequence[Way]]


def shard_offers(holdings: Sequence[Holding], prices: Prices) -> Offers:
    """Return what ranks that hold parts of the state can offer: each source alone for all lost ranks, and the best.

    A survivor that has to go back does so by whatever is cheapest for it.
    """
    table = _Table(holdings, prices)
    lost = [holding.rank for holding in table.ranks if holding.fresh]
    try:
        best, why = table.plan(ORDER), ""
    except Unrecoverable as error:
        best, why = None, str(error)
    if not lost:
        return [Offer(sources=(), plan=best, why_not=why)], why
    found = []
    for only in ORDER:
        try:
            found.append(Offer(sources=(only,), plan=table.plan((only,))))
        except Unrecoverable:
            found.append(Offer(sources=(only,), plan=None, why_not=table.why_not(only)))
    if best is not None:
        used = {prices.source_of(action) for action in best.actions if action.rank in lost} - {None}
        if len(used) > 1:
            found.append(Offer(sources=tuple(source for source in ORDER if source in used), plan=best))
    return found, why


def plan_shards(holdings: Sequence[Holding], prices: Prices) -> Plan:
    """Return the best plan from whatever there is.

    Raises:
        Unrecoverable: some part is held by nobody, or at no step that the others can go to.
    """
    return _Table(holdings, prices).plan(ORDER)


class _Table:
    """Who could go on at which step, and how."""

    def __init__(self, holdings: Sequence[Holding], prices: Prices) -> None:
        line = merged(holding.line for holding in holdings)
        told = sorted(holdings, key=lambda holding: holding.rank)
        self.ranks = [useful(holding, line) for holding in told]
        self._passed_over = self.ranks != told
        self._prices = prices
        standing = {holding.rank: holding.step for holding in self.ranks if _stands(holding, line)}
        places: dict[str, list[Holding]] = {}
        for holding in self.ranks:
            assert holding.place is not None
            places.setdefault(holding.place, []).append(holding)
        self._places: Places = places
        for members in places.values():
            check_same_layout(members)
            check_replicas([holding for holding in members if holding.rank in standing])
        elsewhere = kept_elsewhere(self.ranks)
        self._ways = {
            holding.rank: _ways(holding, places, standing, elsewhere.get(holding.rank, {}), prices)
            for holding in self.ranks
        }

    def plan(self, allowed: Collection[Source]) -> Plan:
        """Return the best plan in which the lost ranks use allowed sources only.

        Raises:
            Unrecoverable: some part is held by nobody, or at no step that the others can go to.
        """
        best: dict[Rank, dict[Step, Way]] = {}
        for holding in self.ranks:
            best[holding.rank] = {}
            for step, ways in self._ways[holding.rank].items():
                able = [way for way in ways if way.source is None or not holding.fresh or way.source in allowed]
                if able:
                    best[holding.rank][step] = min(able, key=_seconds)
        common = set.intersection(*({*found} for found in best.values()))
        if not common:
            raise Unrecoverable(_why_none(self.ranks, best))
        newest = max(common)

        def expected_s(step: Step) -> tuple[float, int]:
            again_s = (newest - step) * self._prices.step_s.value
            return max(found[step].seconds for found in best.values()) + again_s, newest - step

        step = min(common, key=expected_s)
        actions = [action for holding in self.ranks for action in best[holding.rank][step].actions]
        actions.sort(key=lambda action: isinstance(action, Settle))
        reason = _reason(self.ranks, step, actions)
        if step < newest:
            reason += f"; from there to step {newest} is a shorter way than to have the state of that one"
        if self._passed_over:
            reason += "; snapshots of steps that were done again since are passed over"
        return Plan(step=step, reason=reason, actions=tuple(actions))

    def why_not(self, source: Source) -> str:
        """Say why the lost ranks cannot all have their state from there."""
        lacking = [
            holding.rank
            for holding in self.ranks
            if holding.fresh
            and not any(way.source is source for ways in self._ways[holding.rank].values() for way in ways)
        ]
        if not lacking:
            return "what is there is of no step that every rank can be at"
        match source:
            case Source.MEMORY:
                return f"the memory of their host has no snapshot of {name_ranks(lacking)}"
            case Source.PEER:
                return f"no other host has a snapshot of {name_ranks(lacking)}"
            case _ if all(len(self._places[holding.place or ""]) == 1 for holding in self.ranks):
                return "no two ranks hold the same part"
            case _:
                return f"no replica of {name_ranks(lacking)} stands where its predecessor's random numbers are known"


def _seconds(way: Way) -> float:
    return way.seconds


def useful(holding: Holding, line: Line) -> Holding:
    """Return what a rank holds without snapshots of a future that was given up."""
    return replace(
        holding,
        snapshots=tuple((step, taken) for step, taken in holding.snapshots if lies_on(line, step, taken)),
        kept=tuple((rank, step, taken) for rank, step, taken in holding.kept if lies_on(line, step, taken)),
    )


def kept_elsewhere(ranks: Sequence[Holding]) -> dict[Rank, dict[Step, set[int]]]:
    """Return which hosts keep a snapshot for others: by rank, then by step."""
    found: dict[Rank, dict[Step, set[int]]] = {}
    for holding in ranks:
        for rank, step, _ in holding.kept:
            found.setdefault(rank, {}).setdefault(step, set()).add(holding.node)
    return found


def restores(holding: Holding, elsewhere: Mapping[Step, Collection[int]]) -> dict[Step, Restore]:
    """Return the snapshots that a rank can have, by step, each from the nearest host that keeps it."""
    found: dict[Step, list[int | None]] = {step: [None] for step in sorted({step for step, _ in holding.snapshots})}
    for step, nodes in elsewhere.items():
        able = [node for node in nodes if (step, node) not in holding.refused]
        if able:
            found.setdefault(step, []).extend(sorted(able, key=lambda node: (node != holding.node, node)))
    return {step: Restore(rank=holding.rank, step=step, node=hosts[0]) for step, hosts in found.items()}


def _stands(holding: Holding, line: Line) -> bool:
    """Whether a rank's own state is that of its step's start, on the line."""
    return holding.step is not None and not holding.updated and lies_on(line, holding.step, holding.generation)


def _ways(
    holding: Holding,
    places: Places,
    standing: Mapping[Rank, Step | None],
    elsewhere: Mapping[Step, Collection[int]],
    prices: Prices,
) -> Ways:
    """Return the steps at which a rank could go on, each with the ways there.

    ``standing``: who stands at the start of which step. ``elsewhere``: hosts that keep a snapshot, by step.
    """
    assert holding.place is not None
    found: dict[Step, list[Way]] = {}

    def offer(step: Step, action: Action | None, own: Own) -> None:
        actions = (*([action] if action is not None else []), Settle(rank=rank, step=step, own=own))
        source = None if action is None else prices.source_of(action)
        way = Way(source, sum(map(prices.seconds, actions)), actions)
        found.setdefault(step, []).append(way)

    rank, here = holding.rank, {step for step, _ in holding.snapshots}
    if (at := standing.get(rank)) is not None:
        offer(at, None, Own.CAPTURED)
    for step in sorted(here):
        offer(step, Restore(rank=rank, step=step), Own.SNAPSHOT)
    for step, nodes in elsewhere.items():
        able = [node for node in nodes if (step, node) not in holding.refused]
        for near in (True, False):
            hosts = sorted(node for node in able if (node == holding.node) is near)
            if hosts:
                offer(step, Restore(rank=rank, step=step, node=hosts[0]), Own.SNAPSHOT)
    replicas: dict[Step, list[Holding]] = {}
    for other in places[holding.place]:
        if other.rank != rank and (step_there := standing.get(other.rank)) is not None:
            replicas.setdefault(step_there, []).append(other)
    for step, others in replicas.items():
        if step not in holding.own_steps and holding.step != step:
            continue
        if not holding.fresh and step in here:
            continue  # its own has the data's cursor of the step's start, too
        sources = tuple(other.rank for other in others)
        copy = Copy(rank=rank, sources=sources, step=step, params=None, staged=not holding.fresh)
        offer(step, copy, Own.PREDECESSOR if holding.fresh else Own.CAPTURED)
    return found


def _why_none(ranks: Sequence[Holding], ways: Mapping[Rank, Mapping[Step, Way]]) -> str:
    lost = [holding.rank for holding in ranks if not ways[holding.rank]]
    if lost:
        return (
            f"the state of {name_ranks(lost)} is lost: no replica of it lives, and the memory that held its snapshots "
            "is gone or damaged"
        )
    can = "; ".join(f"rank {rank}: {sorted(steps)}" for rank, steps in ways.items())
    return f"there is no step at which every rank could go on ({can})"


def _reason(ranks: Sequence[Holding], step: Step, actions: Sequence[Action]) -> str:
    lost = [holding.rank for holding in ranks if holding.fresh]
    back = [holding.rank for holding in ranks if holding.step is not None and holding.step > step]
    restored = [action.rank for action in actions if isinstance(action, Restore)]
    copied = [action.rank for action in actions if isinstance(action, Copy)]
    parts = []
    near = sorted({*lost} & {action.rank for action in actions if isinstance(action, Restore) and action.node is None})
    far = sorted({*lost} & {*restored} - {*near})
    if near:
        parts.append(f"the memory of their host still has the part of {name_ranks(near)}")
    if far:
        parts.append(f"another host's memory has the part of {name_ranks(far)}")
    if {*lost} & {*copied}:
        parts.append(f"a replica of {name_ranks(sorted({*lost} & {*copied}))} lives")
    if back:
        parts.append(f"{name_ranks(back)} had gone on, and go back to their own snapshots")
    again = sorted({*restored} - {*lost} - {*back})
    if again:
        parts.append(f"{name_ranks(again)} had begun to update")
    return "; ".join(parts) if parts else f"nobody's state was lost: step {step} runs again"
