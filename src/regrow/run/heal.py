"""Join a generation: reconnect, say what is held, plan, do it, and go on. The same for survivors and replacements.

Every action can be done again: a failure anywhere in here starts over with the next generation, from whatever is held
by then.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from regrow import fsdp, testing
from regrow.ddp import Buckets
from regrow.errors import PeerLost, Superseded, Unrecoverable
from regrow.group import Fabric
from regrow.ids import Generation, Rank, Step
from regrow.journal import Damaged
from regrow.peer import memory
from regrow.plan import Copy, Holding, Load, Own, Plan, Restore, Settle, Undo, make_plan
from regrow.run.flow import Flow
from regrow.run.link import Link
from regrow.run.mirror import MirroredSlots
from regrow.run.snapshots import Snapshots
from regrow.run.stages import Stages
from regrow.slots import Left
from regrow.state import image
from regrow.state.registry import Registry
from regrow.state.small import SmallState
from regrow.updates import Updates


class Healer:
    """Brings this rank to the world's newest generation, with the state that the plan gives it."""

    def __init__(
        self,
        *,
        rank: Rank,
        link: Link,
        fabric: Fabric,
        registry: Registry,
        small: SmallState,
        updates: Updates,
        buckets: list[Buckets],
        stages: Stages | None,
        snapshots: Snapshots | None,
        mirror: MirroredSlots | None,
        dead_after_s: float,
    ) -> None:
        self._rank = rank
        self._link = link
        self._fabric = fabric
        self._registry = registry
        self._small = small
        self._updates = updates
        self._buckets = buckets
        self._stages = stages
        self._snapshots = snapshots
        self._mirror = mirror
        self._sharded = [root for module in registry.modules.values() for root in fsdp.roots(module)]
        self.moved = False
        """Whether a plan has put this rank elsewhere than it was, perhaps to another try of the same step's number."""
        self._dead_after_s = dead_after_s
        self._left: Left | None = None
        self._layouts: list[Any] = []
        """The layouts of DDP's buckets at the start of the plan's step."""
        self.step: Step | None = Step(0)
        """Completed steps; ``None`` while this rank is a replacement that holds nothing."""

    def arrive(self, left: Left) -> None:
        """This is a replacement: it holds nothing but what its predecessor left."""
        self.step = None
        self._left = left

    def capture(self) -> None:
        """Take the state at the start of a step; a retry goes on from what was taken the first time."""
        assert self.step is not None
        if self._small.step != self.step:
            self._small.capture(self.step)
            for buckets in self._buckets:
                buckets.start()

    def small_part(self) -> image.Small:
        """Return what ``capture`` took, for a checkpoint."""
        own, shared, large = self._small.captured()
        return image.Small(own, shared, large, [buckets.at_start() for buckets in self._buckets])

    @contextmanager
    def preserving(self) -> Iterator[None]:
        """Take away the traces that running the model within leaves in buffers, random numbers and DDP."""
        with ExitStack() as stack:
            stack.enter_context(self._small.preserving())
            for buckets in self._buckets:
                stack.enter_context(buckets.preserving())
            yield

    def settle_buckets(self) -> None:
        """Let DDP's buckets be what they are to be in the next step, while this one can still be done again."""
        for buckets in self._buckets:
            buckets.settle()

    def join(self) -> None:
        """Join the newest generation; afterwards ``step`` says where to go on."""
        self._updates.stop()
        self._abandon_step()
        while True:
            generation = self._link.generation
            try:
                self._join_once(generation)
                return
            except (RuntimeError, TimeoutError) as error:
                # The traceback holds the group that failed: nothing is waited for inside this block.
                if not self._may_retry(error, generation):
                    raise
                problem = f"{type(error).__name__}: {error}"
                found_here = isinstance(error.__cause__, (Damaged, image.Damaged, memory.Damaged))
            self.wait_for_newer(generation, problem, found_here=found_here)

    def _may_retry(self, error: Exception, generation: Generation) -> bool:
        if isinstance(error, Unrecoverable):
            return False
        if isinstance(error, (PeerLost, Superseded, TimeoutError)):
            return True
        return not self._fabric.intact() or self._link.generation != generation

    def wait_for_newer(self, generation: Generation, problem: str, *, found_here: bool = False) -> None:
        """Wait for the generation after a failed one.

        Ask for it when no one else has noticed anything, and at once if what is wrong can be known only here.
        """
        patience_s = 0.0 if found_here else 2 * self._dead_after_s
        newer = self._link.wait_for(lambda world: world.generation > generation, timeout_s=patience_s)
        if not newer:
            self._link.send({"type": "suspect", "generation": generation, "why": problem[:500]})
            limit = self._link.world.setup_deadline_s
            if not self._link.wait_for(lambda world: world.generation > generation, timeout_s=limit):
                raise TimeoutError(f"no new generation after {generation} ({problem})")

    def _abandon_step(self) -> None:
        """Drop what the interrupted backward left behind: half-reduced gradients, DDP's unfinished reduction."""
        if self._snapshots is not None:
            self._snapshots.abandon()
        if self._mirror is not None:
            self._mirror.pause()
        for root in self._sharded:
            fsdp.abandon(root)
        for param in self._registry.params:
            param.tensor.grad = None
        for buckets in self._buckets:
            buckets.abandon()
        if self._stages is not None:
            self._stages.abandon()

    # one generation --------------------------------------------------------------------------------------------------

    def _join_once(self, generation: Generation) -> None:
        holding = self._holding()  # before the others are waited for: it takes a moment, and a replacement longer
        self._meet(generation)
        deadline = time.monotonic() + 30.0
        self._fabric.reconnect(generation, superseded=lambda: self._link.generation != generation, deadline=deadline)
        self._event("joined", generation=generation)
        testing.point("rejoin", self.step)
        envelopes = self._exchange(holding)
        holdings = [Holding.from_json(envelope["holding"]) for envelope in envelopes]
        if self._snapshots is not None:
            self._snapshots.heard(holdings, envelopes)
        if self._mirror is not None:
            holdings = self._mirror.heard(holdings, envelopes)
        plan = self._plan(holdings, generation)
        if self._mirror is not None and self.step is None:
            self._left = self._mirror.fetch(self._rank) or self._left
        self._layouts = _layouts(plan, holdings, envelopes, self._rank)
        self._announce(plan, holdings, generation)
        self._carry_out(plan, holdings, generation)
        if self._stages is not None:
            self._stages.resume(generation, plan, envelopes)
        if self._snapshots is not None:
            self._snapshots.resume(generation, plan.step, envelopes)
        if self._mirror is not None:
            self._mirror.resume(generation, plan.position(self._rank))
        dist.barrier()
        if self._rank == _speaker(holdings):
            self._link.send({"type": "kv_purge", "prefix": f"gen{generation - 1}/"})
        self._link.send({"type": "resumed", "generation": generation, "step": self.step})
        self._event("resumed", generation=generation, step=self.step)

    def _plan(self, holdings: list[Holding], generation: Generation) -> Plan:
        """Return the plan. If nobody lives and there is none, all start from the beginning: that ends this process."""
        try:
            return make_plan(holdings)
        except Unrecoverable as error:
            if not all(holding.fresh for holding in holdings):
                raise
            self._link.send({"type": "forgotten", "generation": generation, "why": str(error)})
            self._link.wait_for(lambda world: False, timeout_s=self._link.world.setup_deadline_s)
            raise

    def _meet(self, generation: Generation) -> None:
        """Wait until every rank is there, a replacement through its set-up, before anyone connects to anyone.

        A rank whose host is lost may have to wait for another one; its set-up has all of its time from then on.
        """
        key = f"gen{generation}/here/"
        keys = [f"{key}{rank}" for rank in range(dist.get_world_size())]
        ask = self._link.ask
        ask({"type": "store", "op": "set", "key": f"{key}{self._rank}"}, b"1", timeout_s=30.0, current=generation)
        waiting = True
        while waiting:
            waiting = bool(self._link.world.homeless)
            limit = self._link.world.setup_deadline_s
            wait = {"type": "store", "op": "wait", "keys": keys, "timeout_s": limit}
            if ask(wait, timeout_s=limit + 10, current=generation).head.get("ok"):
                return
            waiting = waiting or bool(self._link.world.homeless)
        raise TimeoutError(f"not every rank came to generation {generation} within {limit:.0f} s")

    def _exchange(self, holding: Holding) -> list[dict[str, Any]]:
        envelope = {
            "holding": holding.to_json(),
            "buckets": [buckets.at_start() for buckets in self._buckets],
            **(self._stages.envelope() if self._stages is not None else {}),
            **(self._snapshots.envelope() if self._snapshots is not None else {}),
            **(self._mirror.envelope() if self._mirror is not None else {}),
        }
        mine = torch.frombuffer(bytearray(json.dumps(envelope).encode()), dtype=torch.uint8)
        world = dist.get_world_size()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]))
        longest = int(max(sizes))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(gathered, padded)
        texts = [bytes(part[: int(size)].tolist()) for part, size in zip(gathered, sizes, strict=True)]
        return [json.loads(text) for text in texts]

    def _holding(self) -> Holding:
        undoable, exact, why_not = self._updates.undoable()
        left = self._left
        return Holding(
            rank=self._rank,
            step=self.step,
            params=len(self._registry.params),
            layout=self._registry.layout(),
            updated=self._updates.updated(),
            undoable=undoable,
            exact=exact,
            why_not=why_not,
            steady=self._small.steady,
            own_steps=tuple(left.starts) if left is not None else (),
            live_step=left.live[0] if left is not None and left.live is not None else None,
            state_bytes=self._registry.state_bytes(),
            checksum=self._registry.checksum() if self.step is not None and not self._updates.begun else None,
            **(self._stages.holding() if self._stages is not None else {}),
            **(self._snapshots.holding() if self._snapshots is not None else {}),
        )

    def _announce(self, plan: Plan, holdings: list[Holding], generation: Generation) -> None:
        if self._rank != _speaker(holdings):
            return
        lines = plan.lines()
        self._event("plan", generation=generation, lines=lines, reason=plan.reason, step=plan.step)
        text = "\n".join(f"[regrow]   {line}" for line in lines)
        with suppress(OSError):  # a log that cannot be written is no reason not to heal
            print(f"[regrow] plan for generation {generation}\n{text}", file=sys.stderr, flush=True)

    # the plan, carried out -------------------------------------------------------------------------------------------

    def _carry_out(self, plan: Plan, holdings: list[Holding], generation: Generation) -> None:
        began = time.monotonic()
        fresh = {holding.rank for holding in holdings if holding.fresh}
        mine = [action for action in plan.actions if not isinstance(action, Copy) and action.rank == self._rank]
        copies = [action for action in plan.actions if isinstance(action, Copy)]
        for action in mine:
            if isinstance(action, Undo):
                self._updates.undo(action.params)
            elif isinstance(action, Load):
                assert self._stages is not None
                self._install(self._stages.checkpoints.read(action.step))
                self._stages.transport.move(action.step)
            elif isinstance(action, Restore):
                assert self._snapshots is not None
                with self._snapshots.restoring(action.step, action.node) as saved:
                    self._install(saved)
        testing.point("before_transfer", plan.step)
        settle = next(action for action in mine if isinstance(action, Settle))
        if self._rank not in fresh:
            self._settle(settle)  # before anything is sent: what survivors share must be as at the step's start
        flow = Flow(self._fabric.world, self._rank, self._registry, self._small)
        for phase in (
            [copy for copy in copies if copy.rank not in fresh],
            [copy for copy in copies if copy.rank in fresh],
        ):
            for copy in flow.run(phase):
                self._received(copy)
        if self._rank in fresh:
            self._settle(settle)
        testing.point("after_transfer", plan.step)
        self._event(
            "transferred",
            generation=generation,
            bytes_in=flow.bytes_in,
            bytes_out=flow.bytes_out,
            receiving_s=flow.receiving_s,
            seconds=time.monotonic() - began,
        )

    def _install(self, saved: image.Image) -> None:
        """Go back to this rank's own checkpoint or snapshot: all of its state is then that of the step's start."""
        self._updates.complete()  # whatever the interrupted step has done is overwritten
        self.step, self._left = None, self._small.left()  # if it is found damaged, this rank is its own replacement
        saved.install(self._registry)
        self._small.load_shared(saved.small.shared, saved.small.large)
        self._small.load_own(saved.small.own, cursor=True)
        self._layouts = saved.small.layouts
        self._left = None
        self._arrived(saved.step)
        self.moved = True

    def _received(self, copy: Copy) -> None:
        """A copy to this rank is in place: from now on that is what it holds."""
        if copy.params is not None:
            self._updates.forget(copy.params)
        elif copy.staged:
            self._updates.complete()
            self._arrived(copy.step)

    def _settle(self, action: Settle) -> None:
        match action.own:
            case Own.CAPTURED:
                self._small.restore()
            case Own.CURRENT | Own.CHECKPOINT | Own.SNAPSHOT:
                pass  # captured when the copy was put in place
            case Own.PREDECESSOR:
                assert self._left is not None
                self._take_over(self._left.starts[action.step], action.step)
            case Own.PREDECESSOR_LIVE:
                assert self._left is not None and self._left.live is not None
                self._take_over(self._left.live[1], action.step)

    def _take_over(self, own: bytes, step: Step) -> None:
        self._small.load_own(own, cursor=True)
        self._arrived(step)
        self._left = None

    def _arrived(self, step: Step) -> None:
        """From now on this rank holds the state at the start of ``step``, its predecessor's or another rank's."""
        for buckets, layout in zip(self._buckets, self._layouts, strict=True):
            buckets.take(layout)
        self._small.capture(step)
        self.step = step

    def _event(self, name: str, **fields: Any) -> None:
        self._link.send({"type": "event", "event": name, "t": time.time(), **fields})


def _speaker(holdings: list[Holding]) -> Rank:
    """Return the rank that says what is to be said once: a survivor, if there is any."""
    return min(holdings, key=lambda holding: (holding.fresh, holding.rank)).rank


def _layouts(plan: Plan, holdings: list[Holding], envelopes: list[dict[str, Any]], rank: Rank) -> list[Any]:
    """Return the layouts of DDP's buckets that belong to the state at which this rank goes on.

    They are those of a replica that is there. None is if it goes on from a checkpoint, which has them, too.
    """
    step, stage = plan.position(rank), holdings[rank].stage
    for holding, envelope in zip(holdings, envelopes, strict=True):
        if holding.step == step and holding.stage == stage:
            return list(envelope["buckets"])
    return []
