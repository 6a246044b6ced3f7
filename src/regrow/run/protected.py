"""A run under an agent: steps that are interrupted are healed and yielded again."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow import testing
from regrow.ddp import Buckets, Reductions, find_ddp
from regrow.errors import PeerLost
from regrow.group import Fabric
from regrow.ids import Generation, Rank
from regrow.ids import Step as StepNumber
from regrow.journal import Damaged
from regrow.peer.memory import Shelf
from regrow.run import raised, refusals, warm
from regrow.run.base import Run
from regrow.run.heal import Healer
from regrow.run.link import Link, WorldView
from regrow.run.making import Maker, Scene
from regrow.run.parts import Parts
from regrow.run.roles import Roles
from regrow.run.shared_step import Unshareable
from regrow.run.stages import Place
from regrow.run.step import Step
from regrow.run.tolls import Tolls
from regrow.slots import Left
from regrow.state.small import SmallState
from regrow.updates import Updates

if TYPE_CHECKING:
    from regrow.disk.saved import Saved

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
        self._parts = Parts()
        self._tolls = Tolls()
        self._shelf = Shelf(small_state_path.with_suffix(".snapshot"))
        self._link = link
        self._fabric = fabric
        self._replacement = replacement
        self._small_state_path = small_state_path
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
        refusals.check_policy(self._place.rules.policy, staged=self._stage is not None)

    # the loop --------------------------------------------------------------------------------------------------------

    def steps(self, count: int) -> Iterator[Step]:
        """Yield the steps 0 to ``count`` - 1; an interrupted one is yielded again."""
        healer = self._start()
        assert self._small is not None and self._updates is not None
        batches, parts = self._batches(), self._parts
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
            if parts.stages is not None:
                with self._interruptible(waiting=True):
                    parts.stages.help()
                if self._interrupted is not None:
                    continue
            if healer.step >= count:
                if parts.disk is not None:
                    with self._interruptible(waiting=True):
                        parts.disk.finish(healer.step, healer.small_part())
                if self._interrupted is None and self._finish(healer):
                    self._fabric.before_collective = None
                    parts.close()
                    return
                continue
            with self._interruptible():
                parts.begin(healer.step, healer.small_part)
            if self._interrupted is not None:
                continue
            self._updates.begin(healer.step)
            step = Step(self, healer.step, batches, attempt=self._attempt)
            self._attempt += 1
            yield step
            if not step.entered:
                raise ValueError("the loop's body must be in `with step:`, or regrow cannot tell when a step is done")

    @contextlib.contextmanager
    def _interruptible(self, *, waiting: bool = False) -> Iterator[None]:
        """What is done in it may find out that a peer is lost; then the loop is to heal. ``waiting``: for others."""
        self._waiting = waiting
        try:
            yield
        except PeerLost as lost:
            self._interrupted, self._woken_t = f"{type(lost).__name__}: {lost}", time.time()
            self._found_here = isinstance(lost.__cause__, Damaged)
        finally:
            self._waiting = False

    def _start(self) -> Healer:
        if self._started:
            raise ValueError("run.steps() can be used once in a run")
        if not self._registry.params and not self._registry.shared and not self._registry.own:
            raise ValueError(
                "nothing is protected: call run.protect(model=model, optimizer=optimizer) before run.steps()"
            )
        self._started = True
        parts = self._parts
        maker = Maker(self._scene(), parts)
        roles = maker.meet()
        self._bind(roles)
        maker.rounds(roles, lambda: [] if self._small is None else self._small.captured()[2])
        self._small = SmallState(self._registry, maker.slots, self._loader, leave_shared=parts.rounds is not None)
        maker.snapshots_or_stages(
            roles,
            lambda: healer.preserving(),
            schedules=self._schedules,
            build_stage=self._build_stage,
            checkpoint_dir=self._checkpoint_dir,
            checkpoint_every=self._checkpoint_every,
        )
        maker.disk(roles)
        self._updates = Updates(self._registry, exact=self._exact, undo=maker.rules.heals and parts.snapshots is None)
        if self._wait_free:
            self._updates.expect_early_updates()
        self._healer = healer = Healer(
            rank=Rank(self.rank),
            link=self._link,
            fabric=self._fabric,
            registry=self._registry,
            small=self._small,
            updates=self._updates,
            buckets=self._buckets(self._updates),
            stages=parts.stages,
            snapshots=parts.snapshots,
            mirror=parts.mirror,
            disk=parts.disk,
            rounds=parts.rounds,
            dead_after_s=self._dead_after_s,
            rules=maker.rules,
            tolls=self._tolls,
        )
        self._updates.before_update = self._before_update
        self._updates.before_early_update = parts.settle
        saved = parts.disk.find() if parts.disk is not None else None
        if self._replacement:
            self._take_over(healer, maker.slots.left())
        else:
            self._begin(healer, roles, saved)
        self._fabric.before_collective = self._before_collective
        return healer

    def _scene(self) -> Scene:
        return Scene(
            rank=Rank(self.rank),
            world_size=self.world_size,
            place=self._place,
            link=self._link,
            fabric=self._fabric,
            registry=self._registry,
            small_state_path=self._small_state_path,
            shelf=self._shelf,
            replacement=self._replacement,
            stage=self._stage,
            approximate=self._approximate,
            say=self._say,
            event=self._event,
        )

    def _buckets(self, updates: Updates) -> list[Buckets]:
        """Return what knows the layout of each DDP's buckets."""
        buckets = []
        for module in self._registry.modules.values():
            for ddp in find_ddp(module):
                buckets.append(Buckets(ddp, self._fabric))
                if self._wait_free:
                    Reductions(ddp, buckets[-1], updates)
        return buckets

    def _take_over(self, healer: Healer, left: Left) -> None:
        """This is a replacement: hold what its predecessor left, and join the others."""
        healer.arrive(left)
        self._fabric.go_live()
        self._link.on_generation = self._sever
        self._waiting = True
        healer.join()
        self._waiting = False

    def _begin(self, healer: Healer, roles: Roles, saved: Saved | None) -> None:
        """The run begins, or goes on from a checkpoint of an earlier one."""
        if saved is not None:
            healer.begin_from(saved)
            if self.rank == 0:
                self._say(f"goes on at step {saved.step}, from {saved.title}")
            self._event("begun_from", step=saved.step, world=saved.world, generation=self._fabric.generation)
        # Captured before anyone hears that the set-up is done: a replacement of this rank needs it from then on.
        healer.capture()
        begin = healer.step or StepNumber(0)
        self._parts.first(self._fabric.generation, begin, healer.small_part, roles, saved=saved is not None)
        size = sum(param.tensor.nbytes for param in self._registry.params)
        self._link.on_generation = self._sever
        kept = self._parts.snapshots is not None or self._parts.disk is not None
        done = {"type": "setup_done", "step": begin, "param_bytes": size, "kept": kept}
        self._link.send(done, self._fabric.seal())

    def _before_update(self) -> None:
        assert self._healer is not None
        self._healer.settle_buckets()
        self._parts.settle()

    def _say(self, text: str) -> None:
        print(f"[regrow] rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def _event(self, name: str, **fields: Any) -> None:
        self._link.send({"type": "event", "event": name, "t": time.time(), **fields})

    def _sever(self, world: WorldView) -> None:
        """In the watcher thread: wake the main thread, also if it is blocked on a peer that lives."""
        self._fabric.abort(f"generation {world.generation} begins", below=world.generation)
        self._parts.sever(below=world.generation)

    def _heal(self, healer: Healer) -> None:
        self._waiting = True
        self._tolls.interrupted()
        problem, self._interrupted = self._interrupted, None
        found_here, self._found_here = self._found_here, False
        woken_t = time.time() if problem is None else self._woken_t
        if self._link.generation == self._fabric.generation:
            self._fabric.abort(problem or "")
            self._parts.sever(below=self._fabric.generation + 1)
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
        if self._parts.stages is not None:
            self._fabric.engage(self._parts.stages.transport)
        testing.point("before_forward", self._healer.step)

    def leave(self, error: BaseException | None) -> bool:
        """The step's body ended: it is complete, or interrupted, or the user's own error goes on."""
        assert self._healer is not None and self._healer.step is not None and self._updates is not None
        if error is None:
            try:
                if not self._updates.begun:
                    self._before_update()
                if self._parts.stages is not None:
                    self._parts.stages.transport.end()
            except RuntimeError as lost:
                if not self._is_peers_fault(lost):
                    raise
                error = lost
        self._in_step = False
        if self._parts.stages is not None:
            self._fabric.engage(None)
        if error is None:
            self._updates.complete()
            replayed = self._parts.stages is not None and self._parts.stages.transport.replaying
            self._tolls.completed(time.monotonic(), replayed=replayed)
            if self._parts.stages is not None:
                self._parts.stages.complete()
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
        if self._place.rules.heals and (self._parts.stages is None or self._parts.stages.publishes(op)):
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
            "waiting": self._waiting or self._fabric.waiting or self._parts.waiting,
        }
