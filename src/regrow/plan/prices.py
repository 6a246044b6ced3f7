"""How long a plan is expected to take, by what this run has measured. Pure: no clock.

Ranks work beside each other, so the slowest of them counts; then come the steps that all do again. What nobody has
measured yet is assumed, and the text says so. Taking back an update costs next to nothing, and is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from regrow.ids import Step
from regrow.plan.actions import Action, Copy, Load, Patch, Plan, Replay, Restore
from regrow.plan.costs import Costs, Speeds
from regrow.plan.holdings import Holding
from regrow.rules import Source
from regrow.sizes import show_bytes

ASSUMED_BYTES_S = {
    Source.REPLICA: 1e9,
    Source.MEMORY: 5e9,
    Source.PEER: 1e9,
    Source.ROLLBACK: 5e8,
    Source.PARTIAL: 5e8,
    Source.DISK: 5e8,
}
"""What is assumed of the network from one rank to another, of a host's own memory, and of storage."""
ASSUMED_STEP_S = 1.0
FIXED_S = {Source.DISK: 0.05}
"""What it takes besides the bytes, as long as it was not measured with them: all look at a checkpoint together, and
agree that it is whole, before anyone overwrites anything."""
ALIKE = {Source.REPLICA: Source.PEER, Source.PEER: Source.REPLICA}
"""Both come over the network: what is known of one holds for the other."""

HINTS = {
    Source.REPLICA: "as messages are sent",
    Source.MEMORY: "as it was taken",
    Source.PEER: "as it was sent",
    Source.ROLLBACK: "as it was written",
    Source.DISK: "as it was written",
}


@dataclass(frozen=True)
class Figure:
    """A number, and where it comes from if it was not measured as such."""

    value: float
    doubt: str = ""

    @property
    def note(self) -> str:
        """Return what is to be said of it."""
        return f" ({self.doubt})" if self.doubt else ""


def show_s(seconds: float) -> str:
    """Return a duration as people read it: to the millisecond if it is short."""
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"


class Prices:
    """What each action costs, by what all ranks have measured: the median of those that have."""

    def __init__(self, holdings: Iterable[Holding]) -> None:
        ranks = list(holdings)
        self._holdings = {holding.rank: holding for holding in ranks}
        self._largest = max((holding.state_bytes for holding in ranks), default=0)
        self._largest_snapshot = max((holding.snapshot_bytes for holding in ranks), default=0)
        costs = [holding.costs for holding in ranks]
        self.step_s = _median([each.step_s for each in costs]) or Figure(ASSUMED_STEP_S, "assumed")
        # a replayed step is one rank's part of a step: it takes no longer, whatever those of a new process took
        replayed = _median([each.replay_s for each in costs])
        self.replay_s = replayed if replayed is not None and replayed.value < self.step_s.value else self.step_s
        self._rates = {source: _rate(source, costs) for source in ASSUMED_BYTES_S}

    def source_of(self, action: Action) -> Source | None:
        """Return where an action takes state from, if it does."""
        match action:
            case Copy():
                return Source.REPLICA
            case Restore():
                near = action.node in (None, self._holdings[action.rank].node)
                return Source.MEMORY if near else Source.PEER
            case Load():
                return Source.DISK if action.whole else Source.ROLLBACK
            case Patch():
                return Source.PARTIAL
            case _:
                return None

    def seconds(self, action: Action) -> float:
        """Return how long it takes."""
        if isinstance(action, Replay):
            return (action.last - action.first + 1) * self.replay_s.value
        source = self.source_of(action)
        if source is None:
            return 0.0
        rate = self._rates[source]
        moved_s = self._bytes(action) / (rate.value * _lanes(action))
        if not rate.doubt:
            return moved_s
        # what comes from another host's memory goes through the own one: it is never the nearer of the two
        beyond_s = self._bytes(action) / self._rates[Source.MEMORY].value if source is Source.PEER else 0.0
        return FIXED_S.get(source, 0.0) + moved_s + beyond_s

    def say(self, action: Action) -> str:
        """Say how that comes about; nothing if it costs nothing."""
        if isinstance(action, Replay):
            steps = action.last - action.first + 1
            return f"{_count(steps)} of {show_s(self.replay_s.value)}{self.replay_s.note} replayed"
        source = self.source_of(action)
        if source is None:
            return ""
        rate, lanes = self._rates[source], _lanes(action)
        each = f"{show_bytes(rate.value)}/s{' each' if lanes > 1 else ''}{rate.note}"
        among = f" from {lanes} ranks" if lanes > 1 else ""
        then = " and on through the own memory" if source is Source.PEER and rate.doubt else ""
        return f"{show_bytes(self._bytes(action))}{among} at {each}{then}"

    def plan(self, plan: Plan, front: Step) -> tuple[float, str]:
        """Return how long it takes until all have done again what was done before ``front``, and why."""
        by_rank: dict[int, list[Action]] = {}
        for action in plan.actions:
            by_rank.setdefault(action.rank, []).append(action)
        busy = {rank: sum(map(self.seconds, actions)) for rank, actions in by_rank.items()}
        slowest = max(by_rank, key=lambda rank: (busy[rank], -rank))
        parts = [said for action in by_rank[slowest] if (said := self.say(action))]
        again = max(front - plan.step, 0)
        if again:
            parts.append(f"{_count(again)} of {show_s(self.step_s.value)}{self.step_s.note} again")
        worked_off = _worked_off(plan)
        if worked_off:
            unknown = plan.cost is not None and plan.cost.expected is None
            doubt = ", as if all were lost" if unknown else ""
            parts.append(f"{worked_off:.1f} steps of {show_s(self.step_s.value)}{self.step_s.note} more{doubt}")
        steps = again + worked_off
        return busy[slowest] + steps * self.step_s.value, ", ".join(parts) or "nothing is moved"

    def _bytes(self, action: Action) -> float:
        """Return how much is moved. A replacement does not know how much its optimizer will hold: the most of all."""
        holding = self._holdings[action.rank]
        match action:
            case Restore():
                return self._largest_snapshot if holding.fresh else holding.snapshot_bytes
            case Copy():
                whole = max(self._holdings[source].state_bytes for source in action.sources)
                return whole if action.params is None else whole * len(action.params) / max(holding.params, 1)
            case _:
                return self._largest if holding.fresh else holding.state_bytes


def _worked_off(plan: Plan) -> float:
    """Return how many steps more it takes to make up for older values. Where nobody knows: all that they lack."""
    if plan.cost is None:
        return 0.0
    if plan.cost.expected is not None:
        return plan.cost.expected
    return float(max((action.oldest for action in plan.actions if isinstance(action, Patch)), default=1))


def _lanes(action: Action) -> int:
    return len(action.sources) if isinstance(action, Copy) else 1


def _count(steps: int) -> str:
    return f"{steps} step" if steps == 1 else f"{steps} steps"


def _median(found: Sequence[float | None]) -> Figure | None:
    known = [value for value in found if value is not None]
    return Figure(median_low(known)) if known else None


def _rate(source: Source, costs: Sequence[Costs]) -> Figure:
    def told(rows: Iterable[Speeds], which: Source) -> Figure | None:
        return _median([rate for row in rows for key, rate in row if key is which])

    fetched, hinted = [each.fetched for each in costs], [each.hinted for each in costs]
    if found := told(fetched, source):
        return found
    if found := told(hinted, source):
        return Figure(found.value, HINTS[source])
    if source in ALIKE and (found := told(fetched, ALIKE[source]) or told(hinted, ALIKE[source])):
        return Figure(found.value, "as measured elsewhere")
    return Figure(ASSUMED_BYTES_S[source], "assumed")
