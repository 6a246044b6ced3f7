"""Choose where ranks of sharded state go on. Pure: no clock, no sockets, no torch.

Each rank holds a part of the state that may be nowhere else; snapshots of it lie in the memory of its host and of
others. All ranks go on at one step, the newest at which every one of them can be: since it stands there, or has a
snapshot of it, or has a replica (HSDP) that stands there. Only what lies on one line counts (``line``): a host that
comes back may have snapshots of steps that the others have done again since.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from regrow.errors import Unrecoverable
from regrow.ids import Rank, Step
from regrow.plan.actions import Action, Copy, Own, Plan, Restore, Settle, name_ranks
from regrow.plan.holdings import Holding
from regrow.plan.line import Line, lies_on, merged
from regrow.plan.planner import check_replicas, check_same_layout

MEMORY_BYTES_S = 5e9
NETWORK_BYTES_S = 1e9
"""What is assumed of a host's own memory, and of the network from one rank to another: only their order matters."""

Places = Mapping[str, Sequence[Holding]]


def plan_shards(holdings: Sequence[Holding]) -> Plan:
    """Return the plan for ranks that hold parts of the state, those of the same place the same part.

    Raises:
        Unrecoverable: some part is held by nobody, and no snapshot of it is left at a step that the others can go to.
    """
    line = merged(holding.line for holding in holdings)
    told = sorted(holdings, key=lambda holding: holding.rank)
    ranks = [_useful(holding, line) for holding in told]
    standing = {holding.rank: holding.step for holding in ranks if _stands(holding, line)}
    places: dict[str, list[Holding]] = {}
    for holding in ranks:
        assert holding.place is not None
        places.setdefault(holding.place, []).append(holding)
    for members in places.values():
        check_same_layout(members)
        check_replicas([holding for holding in members if holding.rank in standing])
    elsewhere: dict[Rank, dict[Step, set[int]]] = {}
    for holding in ranks:
        for rank, step, _ in holding.kept:
            elsewhere.setdefault(rank, {}).setdefault(step, set()).add(holding.node)
    ways = {holding.rank: _ways(holding, places, standing, elsewhere.get(holding.rank, {})) for holding in ranks}
    common = set.intersection(*({*found} for found in ways.values()))
    if not common:
        raise Unrecoverable(_why_none(ranks, ways))
    newest = max(common)
    actions = [action for holding in ranks for action in ways[holding.rank][newest]]
    actions.sort(key=lambda action: isinstance(action, Settle))
    reason = _reason(ranks, newest, actions)
    if ranks != told:
        reason += "; snapshots of steps that were done again since are passed over"
    return Plan(step=newest, reason=reason, actions=tuple(actions))


def _useful(holding: Holding, line: Line) -> Holding:
    """Return what a rank holds without snapshots of a future that was given up."""
    return replace(
        holding,
        snapshots=tuple((step, taken) for step, taken in holding.snapshots if lies_on(line, step, taken)),
        kept=tuple((rank, step, taken) for rank, step, taken in holding.kept if lies_on(line, step, taken)),
    )


def _stands(holding: Holding, line: Line) -> bool:
    """Whether a rank's own state is that of its step's start, on the line."""
    return holding.step is not None and not holding.updated and lies_on(line, holding.step, holding.generation)


def _ways(
    holding: Holding, places: Places, standing: Mapping[Rank, Step | None], elsewhere: Mapping[Step, Collection[int]]
) -> dict[Step, list[Action]]:
    """Return the steps at which a rank could go on, each with the cheapest way there.

    ``standing``: who stands at the start of which step. ``elsewhere``: hosts that keep a snapshot, by step.
    """
    assert holding.place is not None
    costs: dict[Step, tuple[float, list[Action]]] = {}

    def offer(step: Step, cost: float, *actions: Action) -> None:
        if step not in costs or cost < costs[step][0]:
            costs[step] = cost, list(actions)

    rank, here = holding.rank, {step for step, _ in holding.snapshots}
    if (at := standing.get(rank)) is not None:
        offer(at, 0.0, Settle(rank=rank, step=at, own=Own.CAPTURED))
    found: dict[Step, list[int | None]] = {step: [None] for step in sorted(here)}
    for step, nodes in elsewhere.items():
        able = [node for node in nodes if (step, node) not in holding.refused]
        if able:
            found.setdefault(step, []).extend(sorted(able, key=lambda node: (node != holding.node, node)))
    for step, hosts in found.items():
        near = hosts[0] in (None, holding.node)
        restore = Restore(rank=rank, step=step, node=hosts[0])
        settle = Settle(rank=rank, step=step, own=Own.SNAPSHOT)
        offer(step, holding.snapshot_bytes / (MEMORY_BYTES_S if near else NETWORK_BYTES_S), restore, settle)
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
        own = Own.PREDECESSOR if holding.fresh else Own.CAPTURED
        cost = others[0].state_bytes / (NETWORK_BYTES_S * len(sources))
        offer(step, cost, copy, Settle(rank=rank, step=step, own=own))
    return {step: actions for step, (_, actions) in costs.items()}


def _why_none(ranks: Sequence[Holding], ways: Mapping[Rank, Mapping[Step, list[Action]]]) -> str:
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
        parts.append(f"a replica of {name_ranks(sorted({*lost} & {*copied}))} lives, which is cheaper than a snapshot")
    if back:
        parts.append(f"{name_ranks(back)} had gone on, and go back to their own snapshots")
    again = sorted({*restored} - {*lost} - {*back})
    if again:
        parts.append(f"{name_ranks(again)} had begun to update")
    return "; ".join(parts) if parts else f"nobody's state was lost: step {step} runs again"
