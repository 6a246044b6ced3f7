"""A run under an agent: steps that are interrupted are healed and yielded again."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from regrow import testing, undo
from regrow.courier import Courier
from regrow.ddp import Buckets, Reductions, find_ddp
from regrow.errors import PeerLost, RegrowError
from regrow.group import Fabric
from regrow.ids import Generation, Rank
from regrow.ids import Step as StepNumber
from regrow.journal import Damaged
from regrow.run import warm
from regrow.run.base import Run
from regrow.run.heal import Healer
from regrow.run.link import Link, WorldView
from regrow.run.roles import Roles
from regrow.run.shared_step import Unshareable
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
        self._link = link
        self._fabric = fabric
        self._replacement = replacement
        self._slots = Slots(small_state_path)
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
        self._report_own_exceptions()
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
        for optimizer in self._registry.optimizers.values():
            undo.check_supported(optimizer)
        # importing it takes seconds; without it nothing is sharded
        sharding = sys.modules.get("torch.distributed.tensor")
        for param in self._registry.params:
            if sharding is not None and isinstance(param.tensor, sharding.DTensor):
                raise ValueError(
                    f"parameter {param.name} is sharded over ranks, so no replica of it exists to heal from: "
                    "regrow protects data-parallel models (DistributedDataParallel) and pipelines of whole stages. "
                    "FSDP and tensor parallelism, also within a stage, are not supported yet"
                )
        wrapped = [ddp for module in self._registry.modules.values() for ddp in find_ddp(module)]
        if any(ddp.static_graph for ddp in wrapped):
            # its first backward has a collective more, which a replacement would wait for alone
            raise ValueError(
                "DistributedDataParallel with static_graph=True is not supported yet: leave it off "
                "(find_unused_parameters and gradient_as_bucket_view may stay)"
            )
        if self._wait_free:
            self._check_wait_free(wrapped)
            if self._stage is not None:
                raise ValueError(
                    "protect(wait_free=True) is not supported together with stage= yet: use one or the other"
                )

    def _check_wait_free(self, wrapped: list[DistributedDataParallel]) -> None:
        if not wrapped:
            raise ValueError("protect(wait_free=True) needs a DistributedDataParallel model and its optimizer")
        if any(ddp.find_unused_parameters for ddp in wrapped):
            raise ValueError(
                "protect(wait_free=True): with find_unused_parameters=True it is not known during backward which "
                "parameters must not be updated; use one or the other"
            )
        if any(
            isinstance(value, torch.amp.GradScaler) and value.is_enabled() for value in self._registry.shared.values()
        ):
            raise ValueError(
                "protect(wait_free=True): a GradScaler unscales gradients after backward, when wait-free updates have "
                "used them already; use one or the other"
            )

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
                    return
                continue
            if self._stages is not None and not self._begin(self._stages, healer):
                continue
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
        if self._stage is not None:
            courier = Courier(self.rank, self._place.host_addr, self._place.token)
        roles = Roles.exchange(self._stage, self._place.domain(self.rank), courier.address if courier else ("", 0))
        self._bind(roles)
        self._small = SmallState(self._registry, self._slots, self._loader)
        if courier is not None:
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
        self._updates = Updates(self._registry, exact=self._exact)
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
            dead_after_s=self._dead_after_s,
        )
        self._updates.before_update = healer.settle_buckets
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
            size = sum(param.tensor.nbytes for param in self._registry.params)
            self._link.on_generation = self._sever
            self._link.send({"type": "setup_done", "step": 0, "param_bytes": size}, self._fabric.seal())
        self._fabric.before_collective = self._before_collective
        return healer

    def _sever(self, world: WorldView) -> None:
        """In the watcher thread: wake the main thread, also if it is blocked on a peer that lives."""
        self._fabric.abort(f"generation {world.generation} begins", below=world.generation)
        if self._stages is not None:
            self._stages.sever(below=world.generation)

    def _heal(self, healer: Healer) -> None:
        self._waiting = True
        problem, self._interrupted = self._interrupted, None
        found_here, self._found_here = self._found_here, False
        woken_t = time.time() if problem is None else self._woken_t
        if self._link.generation == self._fabric.generation:
            self._fabric.abort(problem or "")
            if self._stages is not None:
                self._stages.sever(below=self._fabric.generation + 1)
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
                    self._healer.settle_buckets()
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

    def _beat(self) -> dict[str, Any]:
        step = self._healer.step if self._healer is not None else None
        return {
            "step": step,
            "ops": self._fabric.ops_issued,
            "waiting": self._waiting or self._fabric.waiting or (self._stages is not None and self._stages.waiting),
        }

    def _report_own_exceptions(self) -> None:
        """Tell the agent of an exception that ends this worker, so that a bug is not taken for a fault for ever."""
        before = sys.excepthook

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            step = self._healer.step if self._healer is not None else None
            text = "".join(traceback.format_exception(kind, error, trace))
            misuse = _is_misuse(error, trace)
            self._link.send(
                {
                    "type": "raised",
                    "step": step,
                    "kind": kind.__name__,
                    "message": str(error)[:2000],
                    "traceback": "" if misuse else text[-20000:],
                    "fatal": misuse or isinstance(error, RegrowError),
                }
            )
            if not misuse:  # the agent says it, in one sentence and once
                before(kind, error, trace)

        sys.excepthook = report


def _is_misuse(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether regrow itself refused what it was given: that needs a sentence, not a traceback, and no second try."""
    if not isinstance(error, ValueError):
        return False
    last = None
    for frame, _ in traceback.walk_tb(trace):
        last = frame.f_globals.get("__name__", "")
    return last is not None and last.split(".")[0] == "regrow"
