"""This rank's snapshots: its state at the start of every step, copied to the host's memory while the step computes.

The copy begins with the step and must end before its update, which waits for it. Two buffers are enough, since a new
snapshot is begun only when every rank has the one before it whole: so at any moment there is a step whose snapshot
everyone has, and it is never overwritten. That all have it is learnt in the background (``gate``). Whoever has
other hosts to send them to does so when the network is idle (``pacing``), and where that does not suffice, takes fewer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from regrow import testing
from regrow.courier import Address, Courier
from regrow.errors import PeerLost
from regrow.ids import Rank, Step
from regrow.peer import memory
from regrow.peer.memory import Shelf
from regrow.plan import Holding
from regrow.plan.line import BEFORE_ALL, Line, extended, lies_on, merged
from regrow.plan.placement import check_memory
from regrow.rules import Source
from regrow.run import gate, taking
from regrow.run.copies import Copies
from regrow.run.pacing import Pacer
from regrow.run.roles import Roles
from regrow.slots import Slots
from regrow.state import image
from regrow.state.registry import Registry

_LOOK_EVERY_S = 0.25
_GATE_WITHIN = timedelta(days=7)
"""Others may be slow; whether they make progress is the agents' to see, and the end of the generation ends the wait."""

Say = Callable[[str], None]
Event = Callable[..., None]


@dataclass
class _Task:
    """One snapshot under way. The state must not change before ``copied``."""

    step: Step
    generation: int
    small: image.Small
    needed: bool = True
    """Whether there is something to copy; else it is there already, and only the others are waited for."""
    then: int = 1
    """After so many steps the next one is taken. Known, and the same on all ranks, when this one is copied."""
    copied: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    """Everyone has it, or the generation has ended."""
    called_off: bool = False
    error: BaseException | None = None


class Snapshots:
    """Takes, finds and reads them. ``superseded``: whether a newer generation has begun."""

    def __init__(
        self,
        rank: Rank,
        world: int,
        *,
        shelf: Shelf,
        slots: Slots,
        courier: Courier,
        copies: Copies | None,
        registry: Registry,
        ranks_here: int,
        pacer: Pacer | None,
        every: int | None,
        blocking: bool,
        superseded: Callable[[], bool],
        say: Say,
        event: Event,
    ) -> None:
        """``ranks_here``: how many ranks keep their snapshots in this host's memory.

        ``every``: one is taken at the start of every so many steps; ``None``: of as many as the network allows.
        ``blocking``: a step that takes one begins when it is copied. ``every`` is then the same on all ranks.
        """
        self._pacer = pacer
        self._every = every
        self._blocking = blocking
        self._agreed = self._until_agreed
        self._ranks_here = ranks_here
        self._rank = rank
        self._world = world
        self._shelf = shelf
        self._slots = slots
        self._courier = courier
        self._copies = copies
        self._registry = registry
        self._superseded = superseded
        self._say = say
        self._event = event
        self._task: _Task | None = None
        self._before: _Task | None = None
        self._generation = 0
        self._line: Line = ()
        self._bad: set[Step] = set()
        self._refused: set[tuple[Step, int]] = set()
        """Snapshots that another host has, or should have, and that cannot be had from there."""
        self.waiting = False
        """Whether an update waits for a copy right now."""
        self._waited_s = 0.0
        self._copy_s = 0.0
        self._taken = 0
        self._bytes = 0

    @property
    def _until_agreed(self) -> int:
        """After how many steps the next one is taken while nothing was agreed on, as a replacement knows of nothing."""
        return self._every if self._blocking and self._every is not None else 1

    # what there is ---------------------------------------------------------------------------------------------------

    def holding(self) -> dict[str, Any]:
        """Return what others must know of this rank's snapshots to make a plan."""
        heads = [head for head in self._shelf.heads() if head.step not in self._bad]
        kept = [] if self._copies is None else self._copies.kept()
        return {
            "place": self._registry.place(),
            "snapshots": tuple(sorted((head.step, head.generation) for head in heads)),
            "snapshot_bytes": self._bytes or self._registry.state_bytes(),
            "refused": tuple(sorted(self._refused)),
            "node": 0 if self._copies is None else self._copies.node,
            "kept": tuple((rank, head.step, head.generation) for rank, head in kept),
            "generation": self._generation,
            "line": merged([self._line, *(head.line for head in heads), *(head.line for _, head in kept)]),
        }

    def rates(self) -> dict[Source, float | None]:
        """Return how many bytes a second snapshots were copied at, and sent."""
        taken_s = self._bytes * self._taken / self._copy_s if self._copy_s > 0 else None
        return {Source.MEMORY: taken_s, Source.PEER: None if self._pacer is None else self._pacer.bytes_s}

    def envelope(self) -> dict[str, Any]:
        """Return where this rank hears from the others, and where its host keeps their snapshots."""
        return {
            "snapshots": list(self._courier.address),
            **({} if self._copies is None else self._copies.envelope()),
        }

    def heard(self, holdings: Sequence[Holding], envelopes: Sequence[dict[str, Any]]) -> None:
        """All have said what they hold, and where: a snapshot may have to be had from another host."""
        self._line = merged(holding.line for holding in holdings)
        if holdings[self._rank].fresh:  # what it will be given lies on that line
            self._generation = max((generation for generation, _ in self._line), default=0)
        if self._copies is not None:
            self._copies.heard(envelopes)

    @contextlib.contextmanager
    def restoring(self, step: Step, node: int | None = None) -> Iterator[image.Image]:
        """Give a snapshot, in this host's memory, to be installed; a damaged one is named, and not counted on again.

        ``node``: the host that keeps it, if that is not this one.
        """
        name = f"the snapshot of rank {self._rank} at step {step}"
        try:
            found = self._shelf.whole().get(step)
            if node is not None:
                assert self._copies is not None
                found = self._shelf.next(step)
                self._copies.fetch(step, node, found)
            if found is None:
                raise memory.Damaged(f"{name} is gone")
            yield image.assemble(*found.read(name), name)
        except (memory.Damaged, image.Damaged) as error:
            if node is None:
                self._bad.add(step)
            else:
                self._refused.add((step, node))
                self._shelf.next(step).drop()  # it was brought here, and is no better for it
            self._say(f"{error}; it is not used")
            self._event("snapshot_damaged", step=step, why=str(error))
            raise PeerLost(str(error)) from error

    # generations -----------------------------------------------------------------------------------------------------

    def sever(self, *, below: int) -> None:
        """Generations before this one are over: wake whoever waits for the others. Quick."""
        self._courier.sever(below=below)
        if self._copies is not None:
            self._copies.sever()

    def abandon(self) -> None:
        """The step was interrupted: let the copy end, since the state may change from now on."""
        for task in (self._task, self._before):
            if task is not None:
                task.called_off = True
        for task in (self._task, self._before):
            if task is not None:
                task.over.wait()  # it is woken by the end of its generation, and looks up between two tensors
        self._task = self._before = None

    def begin_anew(self, generation: int) -> None:
        """All have gone on with a state that never was: no older snapshot is a past of it."""
        self._line = extended(self._line, generation, BEFORE_ALL)
        self._shelf.drop_unless(lambda head: lies_on(self._line, head.step, head.generation))

    def resume(self, generation: int, step: Step, envelopes: Sequence[dict[str, Any]]) -> None:
        """All go on at this step: what was taken of later ones will be taken again."""
        self._generation = generation
        self._agreed = self._until_agreed
        if self._pacer is not None:
            self._pacer.resume()
        self._line = extended(self._line, generation, step)
        self._shelf.drop_unless(lambda head: lies_on(self._line, head.step, head.generation))
        self._slots.drop_after(step)
        self._courier.resume(generation, [_address(envelope["snapshots"]) for envelope in envelopes])
        if self._copies is not None:
            self._copies.resume(generation, step)

    def close(self) -> None:
        """The run is over: say what snapshots have cost, and let go of what is under way."""
        self._event(
            "snapshots",
            taken=self._taken,
            bytes=self._bytes,
            copy_s=self._copy_s / max(self._taken, 1),
            waited_s=self._waited_s / max(self._taken, 1),
            every=self._agreed,
            **self._pacer_facts(),
        )
        self._courier.close()
        if self._copies is not None:
            self._copies.sever()
        self.abandon()
        if self._copies is not None:
            self._copies.close()

    def _pacer_facts(self) -> dict[str, Any]:
        return {} if self._pacer is None else self._pacer.facts()

    def first(self, generation: int, step: Step, small: image.Small, roles: Roles) -> None:
        """Take the first one, before anyone hears that the set-up is done: from then on it may be needed."""
        self._generation = generation
        self._line = extended((), generation, BEFORE_ALL)
        self._shelf.remove()  # a run that starts again from its beginning finds what it left
        keepers = 1
        if self._copies is not None:
            self._copies.heard(roles.hosts)
            keepers = self._copies.resume(generation, Step(-1))  # an earlier beginning may have left its own
        room = self._shelf.room()
        check_memory(self._ranks_here * taking.expected_bytes(self._registry), keepers, room.bytes, room.limit)
        self._courier.resume(generation, roles.addresses)
        self._copy(_Task(step, generation, small))
        if self._copies is not None:
            self._copies.put(self._shelf.whole()[step])

    # a step ----------------------------------------------------------------------------------------------------------

    def begin(self, step: Step, small: image.Small) -> None:
        """A step begins: take a snapshot of its start, in the background, if it is time for one.

        Raises:
            PeerLost: it was to be waited for, and the generation has ended meanwhile.
        """
        if self._pacer is not None:
            self._pacer.turn()
        if self._task is not None and step < self._task.step + self._task.then:
            return
        task = _Task(step, self._generation, small)
        if step in self._shelf.whole() and step not in self._bad:
            task.needed = False  # a step that runs again
            task.copied.set()
        self._bad.discard(step)
        self._before, self._task = self._task, task
        if self._before is None:
            task.then = self._agreed  # now: a step that runs again does not wait for the thread, the next one may ask
        threading.Thread(target=self._run, args=(task, self._before), name="regrow-snapshot", daemon=True).start()
        if self._blocking:
            self.settle()

    def settle(self) -> None:
        """The state is about to change: wait until the step's snapshot is taken."""
        task = self._task
        if task is None or (task.copied.is_set() and task.error is None):
            return
        began = time.monotonic()
        self.waiting = True
        try:
            while not task.copied.wait(_LOOK_EVERY_S):
                if self._superseded():
                    raise PeerLost("a new generation began while a snapshot was taken", generation=task.generation)
        finally:
            self.waiting = False
            self._waited_s += time.monotonic() - began
        if task.error is not None:
            raise task.error

    # in the background -----------------------------------------------------------------------------------------------

    def _run(self, task: _Task, before: _Task | None) -> None:
        try:
            if before is not None:
                before.over.wait()  # ends with its generation at the latest
                if before.error is not None:
                    raise before.error
            task.then = self._agreed
            if task.needed:
                if self._pacer is not None:
                    self._pacer.until_room(self._copy_s / max(self._taken, 1))
                self._copy(task)
            task.copied.set()
            testing.point("snapshot_taken", task.step)
            if self._copies is not None:
                self._copies.put(self._shelf.whole()[task.step], None if self._pacer is None else self._pacer.pace)
            self._agree(
                gate.meet(
                    self._courier,
                    self._rank,
                    self._world,
                    str(task.step),
                    self._proposal(),
                    _GATE_WITHIN,
                    generation=task.generation,
                )
            )
        except PeerLost as lost:
            task.error = lost
        except Exception as error:  # noqa: BLE001 (raised by the step's update, which waits for this)
            task.error = error
        finally:
            task.copied.set()
            task.over.set()

    def _proposal(self) -> float:
        """Return after how many steps this rank would take the next snapshot but one."""
        found = 1
        if self._pacer is not None and self._copies is not None:
            found = self._pacer.proposal(self._bytes, self._copies.count)
        return float(found if self._every is None else self._every)

    def _agree(self, every: float) -> None:
        """All know how often snapshots are taken, from the next but one on: as often as the slowest can."""
        if int(every) == self._agreed:
            return
        self._agreed = int(every)
        self._event("snapshot_frequency", every=self._agreed, bytes=self._bytes, **self._pacer_facts())
        if self._rank == 0 and self._pacer is not None:
            self._say(self._pacer.explain(self._agreed, self._bytes))

    def _copy(self, task: _Task) -> None:
        began = time.monotonic()
        buffer = self._shelf.next(task.step)

        def between(number: int, count: int) -> None:
            if task.called_off:
                raise PeerLost("the step was interrupted while its snapshot was taken", generation=task.generation)
            if number == count // 2:
                testing.point("snapshot_copy", task.step)

        facts = {"generation": task.generation, "line": self._line}
        layout = taking.write(buffer, self._registry, task.step, task.small, facts, between)
        self._bytes = sum(layout.sizes)
        self._taken += 1
        self._copy_s += time.monotonic() - began


def _address(value: Sequence[Any]) -> Address:
    return str(value[0]), int(value[1])
