"""A run under an agent: steps that are interrupted are healed and yielded again."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from regrow import testing
from regrow.courier import Courier
from regrow.ddp import Buckets, Reductions, find_ddp
from regrow.errors import PeerLost
from regrow.group import Fabric
from regrow.ids import Generation, Rank
from regrow.ids import Step as StepNumber
from regrow.journal import Damaged
from regrow.peer.memory import Shelf
from regrow.run import raised, refusals, warm
from regrow.run.base import Run
from regrow.run.copies import Copies
from regrow.run.heal import Healer
from regrow.run.link import Link, WorldView
from regrow.run.mirror import MirroredSlots
from regrow.run.pacing import Pacer
from regrow.run.roles import Roles
from regrow.run.shared_step import Unshareable
from regrow.run.snapshots import Snapshots
from regrow.run.stages import Place, Stages
from regrow.run.step import Step
from regrow.slots import Slots
from regrow.state.small import SmallState
from regrow.updates import Updates

_REDUCTIONS_BY_BROADCAST = ("broadcast",)


class ProtectedRun(Run):
    """The run of one rank of a protected world."""

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        link: Link,
        fabric: Fabric,
        replacement: bool,
        small_state_path: Path,
        dead_after_s: float,
        place: Place,
    ) -> None:
        super().__init__(rank, world_size)
        self._place = place
        self._stages: Stages | None = None
        self._snapshots: Snapshots | None = None
        self._shelf = Shelf(small_state_path.with_suffix(".snapshot"))
        self._link = link
        self._fabric = fabric
        self._replacement = replacement
        self._small_state_path = small_state_path
        self._slots = Slots(small_state_path)
        self._mirror: MirroredSlots | None = None
        self._dead_after_s = dead_after_s
        self._in_step = False
        self._interrupted: str | None = None
        self._woken_t = 0.0
        self._found_here = False
        self._attempt = 0
        self._waiting = False
        self._warned = False
        self._healer: Healer | None = None
        self._updates: Updates | None = None
        self._small: SmallState | None = None
        link.beat = self._beat
        raised.report_to(link, self._step_in_progress)
        if world_size < 2:
            raise ValueError(
                "a world of 1 worker has no replica to heal from: start at least 2 (--nproc-per-node 2), "
                "or run the script without `regrow run`"
            )

    @property
    def generation(self) -> int:
        """How often the world was reconnected."""
        return self._fabric.generation

    def _check(self) -> None:
        refusals.check(self._registry, wait_free=self._wait_free, staged=self._stage is not None)

    # the loop --------------------------------------------------------------------------------------------------------

    def steps(self, count: int) -> Iterator[Step]:
        """Yield the steps 0 to ``count`` - 1; an interrupted one is yielded again."""
        healer = self._start()
        assert self._small is not None and self._updates is not None
        batches = self._batches()
        for_step = healer.step
        while True:
            # Before anything is healed: whoever has completed a step goes back to the start of the next one, if at all.
            healer.capture()
            if self._interrupted is not None or self._link.generation != self._fabric.generation:
                self._heal(healer)
            assert healer.step is not None
            if healer.step != for_step or healer.moved:
                batches.next_step()
                for_step, self._attempt, healer.moved = healer.step, 0, False
            if self._stages is not None and not self._help(self._stages):
                continue
            if healer.step >= count:
                if self._finish(healer):
                    self._fabric.before_collective = None
                    if self._stages is not None:
                        self._stages.close()
                    if self._snapshots is not None:
                        self._snapshots.close()
                    if self._mirror is not None:
                        self._mirror.close()
                    return
                continue
            if self._stages is not None and not self._begin(self._stages, healer):
                continue
            if self._snapshots is not None:
                self._snapshots.begin(healer.step, healer.small_part())
            self._updates.begin(healer.step)
            step = Step(self, healer.step, batches, attempt=self._attempt)
            self._attempt += 1
            yield step
            if not step.entered:
                raise ValueError("the loop's body must be in `with step:`, or regrow cannot tell when a step is done")

    def _help(self, stages: Stages) -> bool:
        """Help with another rank's replay, if that is this rank's part; whether it came to its end."""
        self._waiting = True
        try:
            stages.help()
        except PeerLost as lost:
            self._interrupted, self._woken_t = f"{type(lost).__name__}: {lost}", time.time()
            return False
        finally:
            self._waiting = False
        return True

    def _begin(self, stages: Stages, healer: Healer) -> bool:
        """A step of a pipeline begins; whether all that its replay needs is there."""
        assert healer.step is not None and self._small is not None
        stages.checkpoints.at_start(healer.step, healer.small_part())
        try:
            stages.begin(healer.step)
        except PeerLost as lost:
            self._interrupted, self._woken_t = f"{type(lost).__name__}: {lost}", time.time()
            self._found_here = isinstance(lost.__cause__, Damaged)
            return False
        return True

    def _start(self) -> Healer:
        if self._started:
            raise ValueError("run.steps() can be used once in a run")
        if not self._registry.params and not self._registry.shared and not self._registry.own:
            raise ValueError(
                "nothing is protected: call run.protect(model=model, optimizer=optimizer) before run.steps()"
            )
        self._started = True
        courier = None
        if self._stage is not None or self._registry.sharded:
            courier = Courier(self.rank, self._place.host_addr, self._place.token, self._say)
        copies = self._copies()
        if copies is not None and not self._registry.sharded:  # of sharded state it is a part of the snapshots
            self._slots = self._mirror = MirroredSlots(self._small_state_path, copies)
        roles = Roles.exchange(
            self._stage,
            self._place.domain(self.rank),
            courier.address if courier else ("", 0),
            copies.envelope() if copies else None,
        )
        self._bind(roles)
        self._small = SmallState(self._registry, self._slots, self._loader)
        if courier is not None and self._stage is None:
            self._snapshots = Snapshots(
                Rank(self.rank),
                self.world_size,
                shelf=self._shelf,
                slots=self._slots,
                courier=courier,
                copies=copies,
                registry=self._registry,
                ranks_here=self._place.ranks_here,
                pacer=self._pacer(copies),
                every=self._place.snapshot_every,
                superseded=lambda: self._link.generation != self._fabric.generation,
                say=self._say,
                event=self._event,
            )
        elif courier is not None:
            self._stages = Stages(
                rank=Rank(self.rank),
                roles=roles,
                place=self._place,
                link=self._link,
                fabric=self._fabric,
                courier=courier,
                registry=self._registry,
                preserving=lambda: healer.preserving(),
                schedules=self._schedules,
                build_stage=self._build_stage,
                checkpoint_dir=self._checkpoint_dir,
                checkpoint_every=self._checkpoint_every,
                replacement=self._replacement,
            )
        self._updates = Updates(self._registry, exact=self._exact, undo=self._snapshots is None)
        if self._wait_free:
            self._updates.expect_early_updates()
        buckets = []
        for module in self._registry.modules.values():
            for ddp in find_ddp(module):
                buckets.append(Buckets(ddp, self._fabric))
                if self._wait_free:
                    Reductions(ddp, buckets[-1], self._updates)
        self._healer = healer = Healer(
            rank=Rank(self.rank),
            link=self._link,
            fabric=self._fabric,
            registry=self._registry,
            small=self._small,
            updates=self._updates,
            buckets=buckets,
            stages=self._stages,
            snapshots=self._snapshots,
            mirror=self._mirror,
            dead_after_s=self._dead_after_s,
        )
        self._updates.before_update = self._before_update
        if self._replacement:
            healer.arrive(self._slots.left())
            self._fabric.go_live()
            self._link.on_generation = self._sever
            self._waiting = True
            healer.join()
            self._waiting = False
        else:
            # Captured before anyone hears that the set-up is done: a replacement of this rank needs it from then on.
            healer.capture()
            if self._stages is not None:
                self._stages.first(healer.small_part())
            if self._mirror is not None:
                self._mirror.first(self._fabric.generation, roles.hosts)
            if self._snapshots is not None:
                self._snapshots.first(self._fabric.generation, healer.small_part(), roles)
            size = sum(param.tensor.nbytes for param in self._registry.params)
            self._link.on_generation = self._sever
            done = {"type": "setup_done", "step": 0, "param_bytes": size, "kept": self._snapshots is not None}
            self._link.send(done, self._fabric.seal())
        self._fabric.before_collective = self._before_collective
        return healer

    def _copies(self) -> Copies | None:
        """Return what brings this rank's snapshots to other hosts, if there are any."""
        if self._place.host is None:
            return None
        return Copies(
            Rank(self.rank),
            self._place.host,
            self._place.token,
            superseded=lambda: self._link.generation != self._fabric.generation,
            say=self._say,
            event=self._event,
        )

    def _pacer(self, copies: Copies | None) -> Pacer | None:
        """Return what keeps snapshots that go to other hosts out of the collectives' way."""
        if copies is None:
            return None
        return Pacer(self._fabric, copies.look, lambda: self._snapshots is not None and self._snapshots.waiting)

    def _before_update(self) -> None:
        assert self._healer is not None
        self._healer.settle_buckets()
        if self._snapshots is not None:
            self._snapshots.settle()

    def _say(self, text: str) -> None:
        print(f"[regrow] rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _event(self, name: str, **fields: Any) -> None:
        self._link.send({"type": "event", "event": name, "t": time.time(), **fields})

    def _sever(self, world: WorldView) -> None:
        """In the watcher thread: wake the main thread, also if it is blocked on a peer that lives."""
        self._fabric.abort(f"generation {world.generation} begins", below=world.generation)
        if self._stages is not None:
            self._stages.sever(below=world.generation)
        if self._snapshots is not None:
            self._snapshots.sever(below=world.generation)
        if self._mirror is not None:
            self._mirror.sever()

    def _heal(self, healer: Healer) -> None:
        self._waiting = True
        problem, self._interrupted = self._interrupted, None
        found_here, self._found_here = self._found_here, False
        woken_t = time.time() if problem is None else self._woken_t
        if self._link.generation == self._fabric.generation:
            self._fabric.abort(problem or "")
            if self._stages is not None:
                self._stages.sever(below=self._fabric.generation + 1)
            if self._snapshots is not None:
                self._snapshots.sever(below=self._fabric.generation + 1)
            if self._mirror is not None:
                self._mirror.sever()
            healer.wait_for_newer(
                Generation(self._fabric.generation), problem or "a new generation began", found_here=found_here
            )
        self._link.send(
            {
                "type": "event",
                "event": "woken",
                "t": woken_t,
                "generation": self._link.generation,
                "step": healer.step,
                "error": problem,
            }
        )
        healer.join()
        self._waiting = False

    def _finish(self, healer: Healer) -> bool:
        """Stay until every rank has done its last step: until then someone may need this rank's state."""
        assert healer.step is not None
        generation = self._fabric.generation
        self._link.send({"type": "finished", "generation": generation, "step": healer.step})
        self._waiting = True
        # No deadline of its own: the agents watch every rank that is waited for, and a lost agent ends this process.
        while not self._link.wait_for(
            lambda world: world.all_finished or world.generation != generation, timeout_s=60.0
        ):
            pass
        self._waiting = False
        return self._link.world.all_finished and self._link.generation == generation

    # a step's body ---------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The step's body begins."""
        assert self._healer is not None
        self._in_step = True
        if self._stages is not None:
            self._fabric.engage(self._stages.transport)
        testing.point("before_forward", self._healer.step)

    def leave(self, error: BaseException | None) -> bool:
        """The step's body ended: it is complete, or interrupted, or the user's own error goes on."""
        assert self._healer is not None and self._healer.step is not None and self._updates is not None
        if error is None:
            try:
                if not self._updates.begun:
                    self._before_update()
                if self._stages is not None:
                    self._stages.transport.end()
            except RuntimeError as lost:
                if not self._is_peers_fault(lost):
                    raise
                error = lost
        self._in_step = False
        if self._stages is not None:
            self._fabric.engage(None)
        if error is None:
            self._updates.complete()
            if self._stages is not None:
                self._stages.complete()
            self._healer.step = StepNumber(self._healer.step + 1)
            if self._replacement:
                self._replacement = False
                warm.settle()
            testing.point("step_end", self._healer.step - 1)
            return False
        if not self._is_peers_fault(error):
            return False
        self._interrupted = f"{type(error).__name__}: {str(error)[:300]}"
        self._woken_t = time.time()
        self._found_here = isinstance(error, Unshareable)
        return True

    def _is_peers_fault(self, error: BaseException) -> bool:
        """Whether the error came from a lost peer and not from the user's code."""
        if not isinstance(error, Exception):
            return False
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain:
            chain.append(link)
            link = link.__cause__ or link.__context__
        if any(isinstance(part, PeerLost) for part in chain):
            return True
        if not any(isinstance(part, RuntimeError) for part in chain):
            return False
        return not self._fabric.intact() or self._link.generation != self._fabric.generation

    def _before_collective(self, op: str) -> None:
        if not self._in_step:
            self._warn_outside(op)
            return
        assert self._healer is not None and self._healer.step is not None
        assert self._small is not None and self._updates is not None
        if self._stages is None or self._stages.publishes(op):
            self._small.publish(self._healer.step)
        if self._updates.begun and not self._wait_free:
            self._updates.expect_failures_after_update()
        if op not in _REDUCTIONS_BY_BROADCAST:
            testing.point("in_backward", self._healer.step)

    def _warn_outside(self, op: str) -> None:
        if self._waiting or self._warned:
            return
        self._warned = True
        print(
            f"[regrow] rank {self.rank}: {op} outside of `with step:` is not protected: a failure during it ends this "
            "worker; move it into the step",
            file=sys.stderr,
            flush=True,
        )

    # the agent -------------------------------------------------------------------------------------------------------

    def _step_in_progress(self) -> int | None:
        return self._healer.step if self._healer is not None else None

    def _beat(self) -> dict[str, Any]:
        return {
            "step": self._step_in_progress(),
            "ops": self._fabric.ops_issued,
            "waiting": self._waiting
            or self._fabric.waiting
            or (self._stages is not None and self._stages.waiting)
            or (self._snapshots is not None and self._snapshots.waiting),
        }
