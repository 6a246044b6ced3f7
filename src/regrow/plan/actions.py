"""What a plan is made of: frozen data that prints. Nothing here does anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from regrow.ids import Rank, Step
from regrow.plan.perturbation import Cost
from regrow.plan.ranges import Indices


def name_ranks(ranks: Sequence[Rank]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    text = ", ".join(str(rank) for rank in ranks)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


class Own(StrEnum):
    """Where a rank takes its own small state from (random numbers, buffers: they differ from rank to rank)."""

    CAPTURED = "captured at the step's start"
    CURRENT = "as it stands after the finished step"
    PREDECESSOR = "left by the predecessor at the step's start"
    PREDECESSOR_LIVE = "left by the predecessor before its last collective"
    CHECKPOINT = "from the checkpoint"
    SNAPSHOT = "from the snapshot"
    LEFT = "left at the step's start, with what all ranks share"
    DONATED = "a survivor's, with random numbers anew"


@dataclass(frozen=True, kw_only=True)
class Undo:
    """``rank`` takes back its update of ``params`` and holds them at ``to_step`` again."""

    rank: Rank
    to_step: Step
    params: Indices
    exact: bool

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        how = "to the very bits" if self.exact else "by arithmetic, within a few ulp"
        return f"undo     {name_ranks(ranks)}: {len(self.params)} parameters back to step {self.to_step}, {how}"


@dataclass(frozen=True, kw_only=True)
class Copy:
    """``rank`` receives ``params`` at ``step`` from ``sources``, each a share.

    ``params=None`` is everything: all parameters, optimizer state, and the small state that all ranks share. ``staged``
    copies go to fresh memory and replace the old state only when whole, since the receiver's state may yet be needed.
    """

    rank: Rank
    sources: tuple[Rank, ...]
    step: Step
    params: Indices | None
    staged: bool
    small: bool = False
    """Only the small state is copied, also what is the source's own."""

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        if self.small:
            return f"copy     {name_ranks(ranks)}: the small state at step {self.step} from {name_ranks(self.sources)}"
        what = "everything" if self.params is None else f"{len(self.params)} parameters"
        return f"copy     {name_ranks(ranks)}: {what} at step {self.step} from {name_ranks(self.sources)}"


@dataclass(frozen=True, kw_only=True)
class Settle:
    """``rank`` puts its own small state in place and goes on at ``step``."""

    rank: Rank
    step: Step
    own: Own

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        return f"settle   {name_ranks(ranks)}: step {self.step}, own random state and buffers {self.own.value}"


@dataclass(frozen=True, kw_only=True)
class Load:
    """``rank`` takes its checkpoint of the start of ``step`` from storage: its own, or its part of the job's."""

    rank: Rank
    step: Step
    whole: bool = False
    """Whether it is a checkpoint of the whole job, which all ranks take together."""

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        what = "the job's checkpoint" if self.whole else "the checkpoint"
        return f"load     {name_ranks(ranks)}: {what} of step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Restore:
    """``rank`` takes the snapshot of the start of ``step`` out of its own host's memory, or out of another one's."""

    rank: Rank
    step: Step
    node: int | None = None
    """The host that keeps it; ``None``: its own."""

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        where = "the host's memory" if self.node is None else f"the memory of host {self.node}"
        return f"restore  {name_ranks(ranks)}: the snapshot of step {self.step} from {where}"


@dataclass(frozen=True, kw_only=True)
class Replay:
    """``rank`` does steps ``first`` to ``last`` again; what ``sources`` sent it then comes out of their journals.

    ``helpers`` stand idle meanwhile, and compute micro-batches of the steps before ``alone_from``.
    """

    rank: Rank
    first: Step
    last: Step
    sources: tuple[Rank, ...]
    helpers: tuple[Rank, ...] = ()
    alone_from: Step | None = None

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        span = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        shared = f", micro-batches shared with {name_ranks(self.helpers)}" if self.helpers else ""
        return f"replay   {name_ranks(ranks)}: {span} from the journals of {name_ranks(self.sources)}{shared}"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """``rank`` takes its blocks from its running checkpoint, each as old as it is there, and goes on at ``step``."""

    rank: Rank
    step: Step
    blocks: int
    oldest: int
    """How many steps old the oldest is."""
    median: int

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        return (
            f"patch    {name_ranks(ranks)}: {self.blocks} blocks from the running checkpoint, {self.median} steps old "
            f"in the median, {self.oldest} at the most"
        )


@dataclass(frozen=True, kw_only=True)
class Keep:
    """``rank`` keeps its live parameters and optimizer state, those that it has after ``step`` steps."""

    rank: Rank
    step: Step

    def describe(self, ranks: Sequence[Rank]) -> str:
        """Say it, for all ranks that do the same."""
        return f"keep     {name_ranks(ranks)}: live parameters and optimizer state, of step {self.step}"


Action = Undo | Copy | Load | Restore | Replay | Patch | Keep | Settle


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for one generation. The same on every rank, since each computes it from the same holdings."""

    step: Step
    reason: str
    actions: tuple[Action, ...]
    warnings: tuple[str, ...] = ()
    positions: tuple[Step, ...] = ()
    """Where each rank goes on, if that differs: those behind replay what those ahead have sent them."""
    weighed: tuple[str, ...] = ()
    """What it was chosen from, a line for each."""
    cost: Cost | None = None
    """If the result will not be the undisturbed run's: what that is expected to cost. Else ``None``."""

    def position(self, rank: Rank) -> Step:
        """Return the step at which a rank goes on."""
        return self.positions[rank] if self.positions else self.step

    @property
    def approximate(self) -> bool:
        """Whether the state at which all go on never existed in an undisturbed run."""
        return self.cost is not None

    @property
    def used_arithmetic_undo(self) -> bool:
        """Whether some bits may differ from the undisturbed run's."""
        return any(isinstance(action, Undo) and not action.exact for action in self.actions)

    def lines(self) -> list[str]:
        """Return the plan as a person reads it."""
        head = f"go on at step {self.step}: {self.reason}"
        alike: dict[Action, list[Rank]] = {}
        for action in self.actions:
            alike.setdefault(replace(action, rank=Rank(-1)), []).append(action.rank)
        said = [action.describe(ranks) for action, ranks in alike.items()]
        if self.cost is not None:
            said.append(f"cost     {self.cost}")
        return [head, *self.weighed, *said, *(f"warning  {text}" for text in self.warnings)]
