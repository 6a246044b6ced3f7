"""One replayed step of which helpers compute a part, while its schedule runs as ever.

Where the schedule asks a stage for the forward or backward of a micro-batch that a helper has, it is given the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regrow.errors import PeerLost
from regrow.journal import Record
from regrow.plan.team import slices
from regrow.run.draws import fingerprint
from regrow.run.helping import Computed, Gradients
from regrow.run.observed import Observed, Task, instead

if TYPE_CHECKING:
    from regrow.run.sharing import SharedReplay


class Unshareable(PeerLost):
    """A shared step turned out not to be shareable: it is done again, alone."""


class Known:
    """What each micro-batch of a step begins with: inputs, random numbers, gradients if they come from elsewhere."""

    def __init__(
        self,
        stages: Sequence[Any],
        seen: Observed,
        records: dict[tuple[str, Task], list[Record]],
        arg_mbs: Sequence[Any] | None,
        kwarg_mbs: Sequence[Any] | None,
    ) -> None:
        self._stages = stages
        self._records = records
        self._args = arg_mbs
        self._kwargs = kwarg_mbs
        self.order = seen.forwards
        self._draws = seen.draws
        self._place = {task: place for place, task in enumerate(seen.forwards)}
        self._states = [torch.get_rng_state()]
        """Where the generator stands before each micro-batch, and after the last, as far as that is known."""

    def random_at(self, place: int) -> torch.Tensor:
        """Return where the generator stands when so many micro-batches are done, drawing again what is not known yet.

        Only when it is asked for: the first helper can begin before the numbers of the others' micro-batches are drawn,
        and what this rank computes itself needs no drawing besides.
        """
        if place >= len(self._states):
            now = torch.get_rng_state()
            torch.set_rng_state(self._states[-1])
            for number, _ in self.order[len(self._states) - 1 : place]:
                self._draws[number].again()
                self._states.append(torch.get_rng_state())
            torch.set_rng_state(now)
        return self._states[place]

    @property
    def random_after(self) -> torch.Tensor:
        """Where the generator stands after the last micro-batch."""
        return self.random_at(len(self.order))

    def leaves_random_at(self, task: Task, state: torch.Tensor | str) -> bool:
        """Whether a computed micro-batch has left the generator where it was expected; a fingerprint will do."""
        place = self._place[task] + 1
        if isinstance(state, str):
            return state == fingerprint(self.random_at(place))
        if place == len(self._states):
            self._states.append(state)
        return torch.equal(state, self.random_at(place))

    def given(self, task: Task) -> dict[str, Any]:
        """Return what a helper needs to compute a micro-batch."""
        number, microbatch = task
        stage = self._stages[number]
        if stage.is_first:
            args = tuple(self._args[microbatch]) if self._args is not None else ()
        else:
            infos = stage.args_recv_info[microbatch]
            args = tuple(
                record.tensor().requires_grad_(info.tensor_meta.requires_grad)
                for record, info in zip(self._records["forward", task], infos, strict=True)
            )
        gradients: Gradients | None = None
        if not stage.is_last:
            came = iter(self._records["backward", task])
            infos = stage.grad_recv_info[microbatch]
            gradients = [None if info.buffer is None else next(came).tensor() for info in infos]
        kwargs = self._kwargs[microbatch] if self._kwargs is not None else None
        return {
            "args": args,
            "kwargs": kwargs or {},
            "gradients": gradients,
            "random": self.random_at(self._place[task]),
        }


class SharedStep:
    """One step of which helpers compute a part.

    This rank's own part is computed before the schedule begins, as far as it can be; so the schedule, which asks for
    one micro-batch after the other, waits for nobody for long. Of the last stage, whose gradients come from the loss,
    the backward follows when the schedule has given the helpers theirs.
    """

    def __init__(self, replay: SharedReplay, helpers: Sequence[int], known: Known) -> None:
        self._helpers = helpers
        self._known = known
        self._sharing = replay.sharing
        self._line = replay.line
        self._stages = replay.stages
        self._hand = replay.hand
        self._owner_of: dict[int, int] = {}
        self._adder = replay.adder
        self._computed: dict[Task, Computed] = {}
        self._outputs: dict[Task, tuple[list[torch.Tensor], bool]] = {}
        self._gradients: dict[Task, Gradients] = {}
        """Of the outputs of the last stage."""
        self._sends: list[tuple[str, Task, list[dist.P2POp]]] = []
        self._scales: list[tuple[Any, tuple[Any, ...]]] = []
        parts = slices(replay.microbatches, len(helpers), replay.lead(len(helpers)), replay.room_for_gradients())
        for helper, part in zip(helpers, parts, strict=False):
            self._owner_of |= dict.fromkeys(part, helper)
        self._dispatch(replay)
        self._adder.begin(helpers[-1], first=False)
        self._begin_sum()
        began = time.monotonic()
        mine = [task for task in known.order if task[1] not in self._owner_of]
        for task in mine:
            self._compute(task, replay.autocast())
        self.own = len(mine)
        """How many micro-batches this rank computes itself, and how long that took."""
        self.computed_s = time.monotonic() - began

    def _dispatch(self, replay: SharedReplay) -> None:
        """Tell the helpers what to do, and give them what they need for it."""
        tasks: dict[int, list[Task]] = {helper: [] for helper in self._helpers}
        for task in self._known.order:
            if task[1] in self._owner_of:
                tasks[self._owner_of[task[1]]].append(task)
        for at, helper in enumerate(self._helpers):
            self._line.tell(helper, "order", replay.order("step", self._helpers, at, tasks[helper]))
        replay.send_state(self._helpers)
        for helper in self._helpers:
            for stage, microbatch in tasks[helper]:
                self._line.tell(helper, f"in/{stage}/{microbatch}", self._known.given((stage, microbatch)))

    def _begin_sum(self) -> None:
        """The sum begins with what the script has left in the gradients."""
        parameters = self._hand.parameters
        present = bytes(parameter.grad is not None for parameter in parameters)
        self._line.courier.send(self._helpers[0], "team/present", memoryview(present), stays=True)
        for at, parameter in enumerate(parameters):
            if parameter.grad is not None:
                self._line.send(self._helpers[0], f"sum/{at}", parameter.grad.contiguous())
                parameter.grad = None
        if any(present):
            self._line.courier.flush()  # it may be the sum of the step before, whose memory is used again

    def _compute(self, task: Task, setting: Sequence[Any]) -> None:
        """Compute a micro-batch of this rank's own part."""
        given = self._known.given(task)
        self._computed[task] = computed = self._hand.forward(task[0], given, setting)
        self._outputs[task] = computed.leaves(), computed.is_tuple
        self._check(task, torch.get_rng_state())
        if given["gradients"] is not None:
            self._back(task, given["gradients"])

    def _back(self, task: Task, gradients: Gradients) -> None:
        back = self._hand.backward(self._computed.pop(task), gradients)
        self._adder.keep(task[1])
        self._stages[task[0]].bwd_cache[task[1]] = tuple(back)

    def _check(self, task: Task, random_after: torch.Tensor | str) -> None:
        if not self._known.leaves_random_at(task, random_after):
            self._sharing.why_not = "how many random numbers a micro-batch draws depends on its values"
            raise Unshareable(f"micro-batch {task[1]} drew other random numbers than the first one did")

    # in place of the stages ------------------------------------------------------------------------------------------

    def standing_in(self) -> AbstractContextManager[None]:
        """Answer the schedule in place of its stages while it does the step."""
        return instead(
            [
                (stage, name, make)
                for number, stage in enumerate(self._stages)
                for name, make in (
                    ("forward_one_chunk", self._forward(number, stage)),
                    ("backward_one_chunk", self._backward(number, stage)),
                    ("get_fwd_send_ops", self._send("forward", number)),
                    ("get_bwd_send_ops", self._send("backward", number)),
                    ("scale_grads", self._scale(stage)),
                )
            ]
        )

    def _forward(self, number: int, stage: Any) -> Callable[..., Any]:
        def forward(microbatch: int, args: Any, kwargs: Any = None, save_forward_output: bool = True) -> Any:
            task = (number, microbatch)
            owner = self._owner_of.get(microbatch)
            if owner is None:
                outputs, is_tuple = self._outputs.pop(task)
            else:
                outputs, is_tuple, name = self._line.hear(owner, f"out/{number}/{microbatch}")
                self._check(task, name)
            output = tuple(outputs) if is_tuple else outputs[0]
            if stage.is_last and save_forward_output:
                stage.output_chunks.append(output)
            stage.fwd_cache[microbatch] = (tuple(outputs), [])
            return output

        return lambda original: forward

    def _backward(self, number: int, stage: Any) -> Callable[..., Any]:
        def backward(microbatch: int, loss: Any = None, *args: Any, **more: Any) -> None:
            outputs, _ = stage.fwd_cache.pop(microbatch)
            if not stage.is_last:
                return
            if loss is not None:
                loss.backward()
            gradients = [output.grad for output in outputs]
            owner = self._owner_of.get(microbatch)
            if owner is None:
                self._gradients[number, microbatch] = gradients
            else:
                self._line.tell(owner, f"gradient/{number}/{microbatch}", gradients)
            for output in outputs:
                output.requires_grad_(False)

        return lambda original: backward

    def _send(self, kind: str, number: int) -> Callable[..., Any]:
        """Put a message by: what goes backward is not there yet, and all must be sent in the schedule's order."""

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def ops(microbatch: int) -> list[Any]:
                ready = original(microbatch) if kind == "forward" else []
                self._sends.append((kind, (number, microbatch), ready))
                return []

            return ops

        return make

    def _scale(self, stage: Any) -> Callable[..., Any]:
        return lambda original: lambda *args: self._scales.append((stage, args))

    # the end ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take what the helpers give: the sum of all gradients, and what goes to the stage before."""
        began = time.monotonic()
        for task, gradients in self._gradients.items():
            self._back(task, gradients)
        self.computed_s += time.monotonic() - began
        self._send_all()
        sums = self._adder.add_up(self._helpers[-1], None)
        for parameter, total in zip(self._hand.parameters, sums, strict=True):
            parameter.grad = total
        for stage, args in self._scales:
            stage.scale_grads(*args)
        torch.set_rng_state(self._known.random_after)
        self._line.courier.flush()  # parameters were sent from where the update will write

    def _send_all(self) -> None:
        """Send, that is take down in the journal, what the schedule has sent, in its order."""
        for kind, (number, microbatch), ready in self._sends:
            ops = ready
            if kind == "backward":
                stage, owner = self._stages[number], self._owner_of.get(microbatch)
                if owner is not None:
                    stage.bwd_cache[microbatch] = tuple(self._line.hear(owner, f"back/{number}/{microbatch}"))
                ops = stage.get_bwd_send_ops(microbatch)
            if ops:
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
