"""Join a generation: reconnect, say what is held, plan, do it, and go on. The same for survivors and replacements.

Every action can be done again: a failure anywhere in here starts over with the next generation, from whatever is held
by then.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from regrow import fsdp, testing
from regrow.ddp import Buckets
from regrow.errors import PeerLost, StartOver, Superseded, Unrecoverable
from regrow.group import Fabric
from regrow.ids import Generation, Rank, Step
from regrow.journal import Damaged
from regrow.peer import memory
from regrow.plan import Copy, Holding, Load, Own, Patch, Plan, Restore, Settle, Undo, decision, make_plan
from regrow.rules import Rules, Source
from regrow.run.flow import Flow
from regrow.run.gather import gather_json
from regrow.run.link import Link
from regrow.run.mirror import MirroredSlots
from regrow.run.rounds import Rounds
from regrow.run.snapshots import Snapshots
from regrow.run.stages import Stages
from regrow.run.standing import Standing
from regrow.run.tolls import Tolls
from regrow.state import image
from regrow.state.registry import Registry
from regrow.state.small import SmallState
from regrow.updates import Updates

if TYPE_CHECKING:  # what they know takes seconds to import, and most runs do not need it
    from regrow.run.disk import Disk


class Healer(Standing):
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
        disk: Disk | None,
        rounds: Rounds | None,
        dead_after_s: float,
        rules: Rules,
        tolls: Tolls,
    ) -> None:
        super().__init__(rank, registry, small, updates, buckets)
        self._link = link
        self._fabric = fabric
        self._stages = stages
        self._snapshots = snapshots
        self._mirror = mirror
        self._disk = disk
        self._rounds = rounds
        self._sharded = [root for module in registry.modules.values() for root in fsdp.roots(module)]
        self._dead_after_s = dead_after_s
        self._rules = rules
        self._tolls = tolls

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
        if self._disk is not None:
            self._disk.abandon()
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
        fresh = self.step is None
        if self._mirror is not None and self.step is None:
            self._left = self._mirror.fetch(self._rank) or self._left
        self._layouts = _layouts(plan, holdings, envelopes, self._rank)
        self._announce(plan, holdings, generation)
        self._carry_out(plan, holdings, generation)
        if self._stages is not None:
            self._stages.resume(generation, plan, envelopes)
        if self._snapshots is not None:
            self._snapshots.resume(generation, plan.step, envelopes)
        if self._disk is not None:
            self._disk.resume(generation, plan.step, envelopes)
        if self._mirror is not None:
            self._mirror.resume(generation, plan.position(self._rank))
        dist.barrier()
        self._set_back = False
        if plan.approximate:  # not before: should this fail, what is exact of others is still needed
            self._begin_anew(generation, plan.step)
        if self._rounds is not None:
            self._rounds.resume(plan.position(self._rank), replaced=fresh or self._replaced)
        self._perturbed = self._replaced = False
        if self._rank == _speaker(holdings):
            self._link.send({"type": "kv_purge", "prefix": f"gen{generation - 1}/"})
        self._link.send({"type": "resumed", "generation": generation, "step": self.step})
        self._event("resumed", generation=generation, step=self.step)

    def _begin_anew(self, generation: Generation, step: Step) -> None:
        """Give up what is older than the state that all go on with: it was never computed from that."""
        if self._snapshots is not None:
            self._snapshots.begin_anew(generation)
        if self._stages is not None:
            self._stages.begin_anew(step)

    def _plan(self, holdings: list[Holding], generation: Generation) -> Plan:
        """Return the plan. If nobody lives and there is none, all start from the beginning: that ends this process.

        So they do where the policy would have everyone go back, and there is nothing yet to go back to.
        """
        try:
            return make_plan(holdings, self._rules)
        except Unrecoverable as error:
            if self._rank == _speaker(holdings):
                recorded = decision.to_json(holdings, self._rules, None, str(error))
                self._event("no_plan", generation=generation, **recorded)
            everyone = isinstance(error, StartOver)
            if not everyone and not all(holding.fresh for holding in holdings):
                raise
            said = {"type": "forgotten", "generation": generation, "why": str(error), "everyone": everyone}
            self._link.send(said)
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
            **(self._disk.envelope() if self._disk is not None else {}),
        }
        return gather_json(envelope)

    def _holding(self) -> Holding:
        undoable, exact, why_not = self._updates.undoable()
        left = self._left
        whole = self._rules.heals and self.step is not None and not self._updates.begun and not self._perturbed
        return Holding(
            rank=self._rank,
            step=self.step,
            params=len(self._registry.params),
            layout=self._registry.layout(),
            updated=self._registry.everything() if self._perturbed else self._updates.updated(),
            undoable=undoable,
            exact=exact,
            why_not=why_not,
            steady=self._small.steady,
            own_steps=tuple(left.starts) if left is not None else (),
            live_step=left.live[0] if left is not None and left.live is not None else None,
            state_bytes=self._registry.state_bytes(),
            checksum=self._registry.checksum() if whole else None,
            set_back=self._set_back,
            costs=self._tolls.costs(
                {
                    **(self._stages.rates() if self._stages is not None else {}),
                    **(self._snapshots.rates() if self._snapshots is not None else {}),
                    **(self._disk.rates() if self._disk is not None else {}),
                }
            ),
            **(self._stages.holding() if self._stages is not None else {}),
            **(self._snapshots.holding() if self._snapshots is not None else {}),
            **(self._disk.holding() if self._disk is not None else {}),
            **(self._rounds.holding(fresh=self.step is None) if self._rounds is not None else {}),
        )

    def _announce(self, plan: Plan, holdings: list[Holding], generation: Generation) -> None:
        if self._rank != _speaker(holdings):
            return
        recorded = decision.to_json(holdings, self._rules, plan)
        if plan.cost is not None:
            recorded |= {"expected": plan.cost.expected, "bound": plan.cost.bound, "c": plan.cost.fit.c}
        self._event("plan", generation=generation, reason=plan.reason, step=plan.step, **recorded)
        text = "\n".join(f"[regrow]   {line}" for line in plan.lines())
        with suppress(OSError):  # a log that cannot be written is no reason not to heal
            print(f"[regrow] plan for generation {generation}\n{text}", file=sys.stderr, flush=True)

    # the plan, carried out -------------------------------------------------------------------------------------------

    def _carry_out(self, plan: Plan, holdings: list[Holding], generation: Generation) -> None:
        began = time.monotonic()
        fresh = {holding.rank for holding in holdings if holding.fresh}
        mine = [action for action in plan.actions if not isinstance(action, Copy) and action.rank == self._rank]
        copies = [action for action in plan.actions if isinstance(action, Copy)]
        if plan.approximate and any(copy.rank == self._rank for copy in copies):
            self._perturbed = True
        for action in mine:
            if isinstance(action, Undo):
                self._updates.undo(action.params)
            elif isinstance(action, (Load, Restore)):
                self._fetch(action, near=holdings[self._rank].node)
            elif isinstance(action, Patch):
                assert self._rounds is not None
                self._perturbed = True
                self._large = self._rounds.put_back(action.step)
        testing.point("before_transfer", plan.step)
        settle = next(action for action in mine if isinstance(action, Settle))
        # before anything is sent: what ranks share must be as at the step's start, on one that was put back as well
        settles_first = self._rank not in fresh or settle.own is Own.LEFT
        if settles_first:
            self._settle(settle)
        flow = Flow(self._fabric.world, self._rank, self._registry, self._small)
        for phase in (
            [copy for copy in copies if copy.rank not in fresh],
            [copy for copy in copies if copy.rank in fresh],
        ):
            for copy in flow.run(phase):
                self._received(copy)
                if copy.params is None:
                    self._tolls.fetched(Source.REPLICA, flow.bytes_in / len(copy.sources), flow.receiving_s)
        if not settles_first:
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

    def _fetch(self, action: Load | Restore, *, near: int) -> None:
        """Take a checkpoint or a snapshot, and note how long that takes. ``near``: this host."""
        began = time.monotonic()
        self._link.send({"type": "fetching", "bytes": self._registry.state_bytes()})
        if isinstance(action, Load):
            source = Source.DISK if action.whole else Source.ROLLBACK
            self._load(action)
        else:
            source = Source.MEMORY if action.node in (None, near) else Source.PEER
            assert self._snapshots is not None
            with self._snapshots.restoring(action.step, action.node) as saved:
                self._install(saved)
        self._tolls.fetched(source, self._registry.state_bytes(), time.monotonic() - began)

    def _load(self, action: Load) -> None:
        if action.whole:
            assert self._disk is not None
            saved = self._disk.read(action.step)
            self._install(saved, saved.world)
        else:
            assert self._stages is not None
            self._install(self._stages.checkpoints.read(action.step))
        if self._stages is not None:
            self._stages.transport.move(action.step)

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
    if not plan.approximate:
        return []
    sources = [action.sources[0] for action in plan.actions if isinstance(action, Copy) and action.rank == rank]
    return list(envelopes[sources[0] if sources else rank]["buckets"])
