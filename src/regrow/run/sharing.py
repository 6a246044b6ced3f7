"""Let idle ranks compute micro-batches of a step that is replayed.

All that a replayed step receives is known before it begins, so its micro-batches can be computed in any order and
anywhere. The schedule itself runs as ever, on the rank whose stage it is: it sends, receives, computes the loss. Only
where it asks a stage for the forward or backward of a micro-batch that a helper has computed, it is given the result.

The first step is done alone and looked at: in which order the schedule receives, computes and sends, what a micro-batch
draws of random numbers, whether it leaves traces. If it does (batch norm's averages), the replay goes on alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from regrow.errors import PeerLost
from regrow.journal import Channel, Record
from regrow.plan.team import Balance, Room, TeamSize, fitting
from regrow.run.helping import Adder, Line, Stagehand, describe, free_memory, here, state_of
from regrow.run.observed import Observed, Task
from regrow.run.shared_step import Known, SharedStep
from regrow.run.transport import Transport

METHOD = "_step_microbatches"
PATIENCE_STEPS = 3
"""For how many steps helpers that are still building are waited for, while the replay goes on alone."""

Say = Callable[[str], None]
Event = Callable[..., None]


def stages_of(schedule: Any) -> list[Any]:
    """Return the pipeline stages that a schedule runs on this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


class Sharing:
    """Stands before a schedule's micro-batches; does nothing unless a replay with helpers is under way."""

    def __init__(
        self, schedule: Any, rank: int, *, line: Line, transport: Transport, helpers: int | None, say: Say, event: Event
    ) -> None:
        """``helpers``: how many there are to be; ``None``: as many as make it faster."""
        self.schedule = schedule
        self.rank = rank
        self.line = line
        self.transport = transport
        self.helpers = helpers
        self.say = say
        self.event = event
        self._replay: SharedReplay | None = None
        if not hasattr(schedule, METHOD):
            raise RuntimeError("this PyTorch's pipeline schedules are built differently: regrow supports torch 2.13")
        self.original = getattr(schedule, METHOD)
        setattr(schedule, METHOD, self._step)
        self.why_not = ""
        """Why this rank's micro-batches cannot be computed elsewhere, once that is known."""

    def begin(self, helpers: Sequence[int], alone_from: int | None) -> None:
        """A generation begins, perhaps with a replay; these ranks wait to be told what to do until a step."""
        self._replay = None
        if helpers and alone_from is not None:
            self._replay = SharedReplay(self, helpers, alone_from)

    def completed(self, step: int) -> None:
        """A step is complete: let the helpers go if it was the last one that is shared."""
        if self._replay is not None and step + 1 >= self._replay.alone_from:
            self.end()

    def end(self) -> None:
        """Let the helpers go."""
        replay, self._replay = self._replay, None
        if replay is not None:
            with contextlib.suppress(PeerLost):  # one that is gone needs no word, and ends the generation anyway
                replay.end()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        replay = self._replay
        if replay is None or self.transport.step >= replay.alone_from:
            return self.original(*args, **kwargs)
        return replay.step(args, kwargs)


class SharedReplay:
    """One replay, and who helps with it."""

    def __init__(self, sharing: Sharing, helpers: Sequence[int], alone_from: int) -> None:
        self.alone_from = alone_from
        self.sharing = sharing
        self.line = sharing.line
        self.schedule = sharing.schedule
        self.stages = stages_of(self.schedule)
        self._modules: list[nn.Module] = [stage.submod for stage in self.stages]
        self._helpers = list(helpers)
        self._able: list[int] | None = None
        self._seen: Observed | None = None
        self._size: TeamSize | None = None
        self._alone_s = 0.0
        self._patience = PATIENCE_STEPS
        self.hand = Stagehand(self._modules)
        self.adder = Adder(self.line, self.hand.parameters)
        self.microbatches = int(self.schedule._n_microbatches)
        self._ended_at = 0.0
        self._elsewhere_s = 0.0
        self._balances: dict[int, Balance] = {}
        self._loaded = -1
        self._fitting = 0
        self._times: dict[int, list[float]] = {}
        for helper in self._helpers:
            like = describe(self._modules)
            indices = [stage.stage_index for stage in self.stages]
            order = {"do": "build", "stages": indices, "like": like, "threads": torch.get_num_threads()}
            self.line.tell(helper, "order", order)

    def end(self) -> None:
        """Let the helpers go, and say how it went."""
        self.sharing.event(
            "replay_shared",
            generation=self.sharing.transport.generation,
            helpers=self._able or [],
            why_not=self.sharing.why_not,
            seconds={str(size): sum(times) / len(times) for size, times in self._times.items()},
            steps={str(size): len(times) for size, times in self._times.items()},
        )
        for helper in self._helpers:
            self.line.tell(helper, "order", {"do": "end"})

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do the micro-batches of a step, with whoever helps."""
        if self._ended_at:
            self._elsewhere_s = time.monotonic() - self._ended_at
        try:
            return self._step(args, kwargs)
        finally:
            self._ended_at = time.monotonic()

    def lead(self, helpers: int) -> float:
        """Return for how many micro-batches' time this rank does more other things in a step than its helpers."""
        return self._balance(helpers).lead

    def _balance(self, helpers: int) -> Balance:
        found = self._balances.get(helpers)
        if found is None:
            busy = self._elsewhere_s / max(self._alone_s / self.microbatches, 1e-6)
            found = self._balances[helpers] = Balance(busy)
        return found

    def room_for_gradients(self) -> int:
        """Return of how many micro-batches a member can keep the gradients apart, in a quarter of the free memory."""
        size = sum(parameter.nbytes for parameter in self.hand.parameters)
        return max(1, free_memory() // 4 // (len(self._helpers) + 1) // max(size, 1))

    def _note(self, step: SharedStep, helpers: int, took_s: float, waited_s: float) -> None:
        if step.own:
            others_s = took_s + self._elsewhere_s - waited_s - step.computed_s
            one_s = max(step.computed_s / step.own, 1e-6)
            balance = self._balance(helpers)
            balance.took(self.microbatches, helpers, own=step.own, busy=others_s / one_s, waited=waited_s / one_s)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._seen is None:
            return self._look_on(args, kwargs)
        members = self._ready()
        known = self._known(args, kwargs) if members else None
        if not members or known is None:
            return self.sharing.original(*args, **kwargs)
        if self._size is None:
            members = self._able = self._probed(members[: self.microbatches], known)
            self._size = TeamSize(
                len(members), self._alone_s, fitting=min(self._fitting, len(members)), fixed=self.sharing.helpers
            )
        count = self._size.helpers
        began, waited_s = time.monotonic(), self.line.courier.waited_s
        if count:
            step = SharedStep(self, members[:count], known)
            with step.standing_in():
                result = self.sharing.original(*args, **kwargs)
            step.finish()
            self._note(step, count, time.monotonic() - began, self.line.courier.waited_s - waited_s)
        else:
            result = self.sharing.original(*args, **kwargs)
        took = time.monotonic() - began
        self._loaded = -1  # the script may update, or call its schedule again with other members
        self._times.setdefault(count, []).append(took)
        self._size.took(took)
        if self._size.nobody:
            self.sharing.end()  # they have their own to do
        return result

    # the first step --------------------------------------------------------------------------------------------------

    def _look_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do a step alone, and see whether and how the next ones can be shared."""
        seen = Observed(self.stages)
        with seen.looking_on():
            began = time.monotonic()
            result = self.sharing.original(*args, **kwargs)
            self._alone_s = time.monotonic() - began
        self._times.setdefault(0, []).append(self._alone_s)
        if not self.schedule._has_backward:
            seen.refuse("its schedule has no backward")
        if seen.why_not:
            self.sharing.why_not = seen.why_not
            self.sharing.say(f"the replay goes on without help: {seen.why_not}")
            self.sharing.end()
        self._seen = seen
        return result

    # who helps -------------------------------------------------------------------------------------------------------

    def _ready(self) -> list[int]:
        """Return the helpers that have built this rank's stages; none while they are waited for."""
        if self._able is not None:
            return self._able
        answered = [helper for helper in self._helpers if self.line.courier.has(helper, "team/ready")]
        if len(answered) < len(self._helpers) and self._patience:
            self._patience -= 1
            return []
        willing = []
        for helper in answered:
            why_not, host, ranks = self.line.hear(helper, "ready")
            if why_not:
                self.sharing.say(f"rank {helper} cannot help: {why_not}")
            else:
                willing.append((helper, Room(host, ranks)))
        first = fitting(Room(*here()), willing)
        self._fitting = len(first)
        self._able = [*first, *(helper for helper, _ in willing if helper not in first)][: self.sharing.helpers]
        return self._able

    def _probed(self, members: list[int], known: Known) -> list[int]:
        """Let everyone compute the first micro-batch, and back; return the helpers that get what this rank gets."""
        if not members:
            return []
        tasks = [(stage, 0) for stage in range(len(self.stages))]
        for at, helper in enumerate(members):
            self.line.tell(helper, "order", self.order("probe", members, at, tasks))
            for task in tasks:
                self.line.tell(helper, f"in/{task[0]}/{task[1]}", known.given(task))
        self.send_state(members)
        expected = self._probe(tasks, known)
        able = []
        for helper in members:
            found = self.line.hear(helper, "probe")
            if found == expected:
                able.append(helper)
            if found == expected or expected is None:
                continue
            other = "its build_stage computes something else than this rank's stage"
            self.sharing.say(f"rank {helper} cannot help: {found if isinstance(found, str) else other}")
        return able

    def _probe(self, tasks: Sequence[Task], known: Known) -> list[str] | None:
        """Return what must come out of a probe; ``None`` if this rank's own stage refuses the gradients of it."""
        random_state = torch.get_rng_state()
        try:
            return [self.hand.probe(task[0], known.given(task), self.autocast()) for task in tasks]
        except PeerLost:
            raise
        except Exception as error:  # noqa: BLE001 (the script's own module, which may well do without being probed)
            self.sharing.why_not = f"computed once more to compare, its stage raised {type(error).__name__}: {error}"
            self.sharing.say(f"the replay goes on without help: {self.sharing.why_not}")
            return None
        finally:
            torch.set_rng_state(random_state)

    def order(self, what: str, members: Sequence[int], at: int, tasks: Sequence[Task]) -> dict[str, Any]:
        """Return what a helper is told: what to compute, and between whom it stands."""
        return {
            "do": what,
            "step": int(self.sharing.transport.step),
            "load": self._loaded != self.sharing.transport.step,
            "tasks": [list(task) for task in tasks],
            "from": members[at - 1] if at else self.sharing.rank,
            "state_to": members[at + 1] if at + 1 < len(members) else None,
            "sum_to": members[at + 1] if at + 1 < len(members) else self.sharing.rank,
            "training": [[part.training for part in module.modules()] for module in self._modules],
            "requires_grad": [parameter.requires_grad for parameter in self.hand.parameters],
            "autocast": self.autocast(),
        }

    def autocast(self) -> list[Any]:
        """Return how the script runs its schedule right now."""
        enabled, cached = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
        return [enabled, torch.get_autocast_dtype("cpu"), cached]

    def send_state(self, members: Sequence[int]) -> None:
        """Send parameters and buffers to the first helper, which passes them on. Once in a step: a probe's stay."""
        if self._loaded == self.sharing.transport.step:
            return
        self._loaded = int(self.sharing.transport.step)
        for at, tensor in enumerate(state_of(self._modules)):
            if tensor.numel():
                self.line.send(members[0], f"state/{at}", tensor.contiguous())

    # what is known before a step begins ------------------------------------------------------------------------------

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """Collect what every micro-batch of this step will receive; ``None`` if something of it is missing."""
        assert self._seen is not None
        records: dict[tuple[str, Task], list[Record]] = {}
        cursors: dict[tuple[int, Channel], int] = {}
        for kind, task in self._seen.receives:
            stage = self.stages[task[0]]
            ops = stage.get_fwd_recv_ops(task[1]) if kind == "forward" else stage.get_bwd_recv_ops(task[1])
            for op in ops:
                channel = self.sharing.transport.channel(op.group, op.tag)
                at = cursors.setdefault((op.peer, channel), 0)
                record = self.sharing.transport.peek(op.peer, channel, at)
                if record is None:
                    return None
                cursors[op.peer, channel] = at + 1
                records.setdefault((kind, task), []).append(record)
        given = dict(zip(("arg_mbs", "kwarg_mbs"), args, strict=False)) | kwargs
        return Known(self.stages, self._seen, records, given.get("arg_mbs"), given.get("kwarg_mbs"))
