"""What one rank says it holds when a generation is joined. Plain data: it travels as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regrow.ids import Rank, Step
from regrow.plan.costs import Costs
from regrow.plan.line import Line
from regrow.plan.ranges import Indices
from regrow.plan.running import Running


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The state of one rank, as far as choosing a recovery needs to know it.

    A parameter stands for itself together with its optimizer state. In the step that was interrupted a survivor may
    have updated some parameters already: those are at ``step + 1``, all others at ``step``.
    """

    rank: Rank
    step: Step | None
    """Completed steps; ``None`` for a replacement, which holds nothing yet."""
    params: int
    """How many parameters there are: must be the same on every rank."""
    layout: str
    """Digest of the parameters' names, shapes and types: must be the same on every rank."""
    updated: Indices = field(default_factory=Indices)
    """Parameters that the interrupted step has already updated."""
    undoable: Indices = field(default_factory=Indices)
    """Those of ``updated`` that can be taken back."""
    exact: bool = True
    """Whether taking back gives the very bits."""
    why_not: str = ""
    """Why some of ``updated`` cannot be taken back."""
    steady: bool = True
    """Whether random state and buffers stayed as they were after the last collective of the last completed step."""
    own_steps: tuple[Step, ...] = ()
    """Steps for which this rank's own small state (random numbers, buffers) is at hand."""
    live_step: Step | None = None
    """For a replacement: the step within which its predecessor last published its own small state."""
    state_bytes: int = 0
    """Size of the parameters and optimizer state."""
    checksum: int | None = None
    """Over the parameters, if this rank has updated none of them in the interrupted step."""
    stage: int | None = None
    """Ranks of the same stage are replicas of each other; ``None``: all ranks are."""
    domain: str = ""
    """What fails together with this rank; what it sends out of there is journaled until a checkpoint is committed."""
    checkpoints: tuple[Step, ...] = ()
    """Steps at whose start this rank's state lies whole on its storage."""
    journal_from: Step | None = None
    """Its journal has what it sent out of its domain in all steps from this one on; ``None``: it has no journal."""
    recent_from: Step | None = None
    """The same for what it sent within its domain, which is kept for a moment only."""
    shares: bool = False
    """Whether this rank can build another one's stage, and let others compute micro-batches of its own."""
    damaged: tuple[tuple[Rank, Step], ...] = ()
    """Ranks whose journal was found damaged by this one, and the step of the record."""

    place: str | None = None
    """For sharded state: a name for the part that this rank holds; ranks of the same name hold the same."""
    snapshots: tuple[tuple[Step, int], ...] = ()
    """Steps of which a snapshot of this rank's state lies whole in its host's memory, and the generation of each."""
    snapshot_bytes: int = 0
    """Size of the newest of them."""
    node: int = 0
    """The host that this rank is on."""
    refused: tuple[tuple[Step, int], ...] = ()
    """Snapshots of this rank that could not be had from the host that was said to keep them: step and host."""
    kept: tuple[tuple[Rank, Step, int], ...] = ()
    """Snapshots of other hosts' ranks that lie in this host's memory, and the generation of each."""
    generation: int = 0
    """The generation that this rank has last gone on in: its own state is of that one."""
    line: Line = ()
    """Where generations went on, as far as this rank, and the snapshots in its host's memory, know."""

    disk: tuple[Step, ...] = ()
    """Steps of which this rank sees a complete checkpoint of the whole job on storage."""

    set_back: bool = False
    """Whether a recovery that was then interrupted has put this rank at the start of its step: it has not taken part in
    that step, even if others have completed it before, so it cannot follow them by a copy."""
    costs: Costs = field(default_factory=Costs)
    """What it has measured."""
    running: Running | None = None
    """What it has of a running checkpoint; ``None``: the user has not said ``approximate=True``."""

    @property
    def fresh(self) -> bool:
        """Whether this is a replacement."""
        return self.step is None

    def to_json(self) -> dict[str, Any]:
        """Return the holding as JSON-able data."""
        return {
            "rank": self.rank,
            "step": self.step,
            "params": self.params,
            "layout": self.layout,
            "updated": self.updated.to_json(),
            "undoable": self.undoable.to_json(),
            "exact": self.exact,
            "why_not": self.why_not,
            "steady": self.steady,
            "own_steps": list(self.own_steps),
            "live_step": self.live_step,
            "state_bytes": self.state_bytes,
            "checksum": self.checksum,
            "stage": self.stage,
            "domain": self.domain,
            "checkpoints": list(self.checkpoints),
            "journal_from": self.journal_from,
            "recent_from": self.recent_from,
            "shares": self.shares,
            "damaged": [list(pair) for pair in self.damaged],
            "place": self.place,
            "snapshots": [list(pair) for pair in self.snapshots],
            "snapshot_bytes": self.snapshot_bytes,
            "node": self.node,
            "refused": [list(pair) for pair in self.refused],
            "kept": [list(one) for one in self.kept],
            "generation": self.generation,
            "line": [list(pair) for pair in self.line],
            "disk": list(self.disk),
            "set_back": self.set_back,
            "costs": self.costs.to_json(),
            "running": None if self.running is None else self.running.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Holding:
        """Read what ``to_json`` gave."""
        return cls(
            rank=Rank(value["rank"]),
            step=None if value["step"] is None else Step(value["step"]),
            params=value["params"],
            layout=value["layout"],
            updated=Indices.from_json(value["updated"]),
            undoable=Indices.from_json(value["undoable"]),
            exact=value["exact"],
            why_not=value["why_not"],
            steady=value["steady"],
            own_steps=tuple(Step(step) for step in value["own_steps"]),
            live_step=None if value["live_step"] is None else Step(value["live_step"]),
            state_bytes=value["state_bytes"],
            checksum=value["checksum"],
            stage=value["stage"],
            domain=value["domain"],
            checkpoints=tuple(Step(step) for step in value["checkpoints"]),
            journal_from=None if value["journal_from"] is None else Step(value["journal_from"]),
            recent_from=None if value["recent_from"] is None else Step(value["recent_from"]),
            shares=value["shares"],
            damaged=tuple((Rank(rank), Step(step)) for rank, step in value["damaged"]),
            place=value["place"],
            snapshots=tuple((Step(step), int(generation)) for step, generation in value["snapshots"]),
            snapshot_bytes=value["snapshot_bytes"],
            node=value["node"],
            refused=tuple((Step(step), int(node)) for step, node in value["refused"]),
            kept=tuple((Rank(rank), Step(step), int(generation)) for rank, step, generation in value["kept"]),
            generation=value["generation"],
            line=tuple((int(generation), Step(step)) for generation, step in value["line"]),
            disk=tuple(Step(step) for step in value["disk"]),
            set_back=value["set_back"],
            costs=Costs.from_json(value["costs"]),
            running=None if value["running"] is None else Running.from_json(value["running"]),
        )
