"""Compute micro-batches of another rank's stage while this rank has nothing else to do.

This rank's own state stays where it is: the other's stage is built beside it, by the script's own ``build_stage``, and
is thrown away in the end. What is computed is what the owner asks for: forward, backward, and the sum of the gradients
of all micro-batches, added one after the other in the order of the micro-batches: its bits are those of one rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from regrow import testing
from regrow.courier import Courier, memory_of
from regrow.errors import PeerLost
from regrow.run.draws import fingerprint
from regrow.state import codec
from regrow.state.small import lift, lower

BuildStage = Callable[[int], nn.Module]
Gradients = list[torch.Tensor | None]
ORDERS_WITHIN = timedelta(days=7)
HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)


class Line:
    """Structured messages to and from the ranks of a team, over the courier."""

    def __init__(self, courier: Courier, timeout: timedelta) -> None:
        self.courier = courier
        self.timeout = timeout

    def tell(self, peer: int, what: str, value: Any) -> None:
        """Send plain data and tensors: large ones from where they are, so they must not change before a flush."""
        large: list[torch.Tensor] = []
        lifted = lift(value, large)
        heads = [[list(tensor.shape), tensor.dtype, tensor.requires_grad] for tensor in large]
        self.courier.send(peer, f"team/{what}", memoryview(codec.encode([lifted, heads])), stays=True)
        for tensor in large:
            self.send(peer, what, tensor.detach().contiguous())

    def hear(self, peer: int, what: str) -> Any:
        """Wait for what ``tell`` sent."""
        lifted, heads = codec.decode(self.courier.take(peer, f"team/{what}", self.timeout))
        large = [torch.empty(shape, dtype=dtype) for shape, dtype, _ in heads]
        for tensor, (_, _, requires_grad) in zip(large, heads, strict=True):
            self.receive(peer, what, tensor)
            tensor.requires_grad_(requires_grad)
        return lower(lifted, large)

    def send(self, peer: int, what: str, tensor: torch.Tensor) -> None:
        """Send a tensor's memory, which must not change before the courier is flushed."""
        self.courier.send(peer, f"team/{what}", memory_of(tensor), stays=True)

    def receive(self, peer: int, what: str, tensor: torch.Tensor) -> None:
        """Receive into a tensor."""
        self.courier.receive(peer, f"team/{what}", tensor, self.timeout).wait()


def state_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """Return what a stage computes with: all parameters and buffers, in an order that owner and helpers share."""
    return [tensor.detach() for module in modules for tensor in (*module.parameters(), *module.buffers())]


def describe(modules: Sequence[nn.Module]) -> list[Any]:
    """Return what must be alike for two stages to compute the same: tensors, parts, and how many hooks they have."""
    return [
        [
            [
                [name, list(tensor.shape), str(tensor.dtype), _hooks(tensor)]
                for name, tensor in (*module.named_parameters(), *module.named_buffers())
            ],
            [[name, type(part).__name__, _hooks(part)] for name, part in module.named_modules()],
        ]
        for module in modules
    ]


def _hooks(owner: nn.Module | torch.Tensor) -> list[int]:
    """Return how many hooks of each kind there are: what one does, a helper without it would not."""
    return [len(getattr(owner, name, None) or ()) for name in HOOKS]


class Adder:
    """Adds up the gradients of a step's micro-batches in their order, whoever has computed them.

    The sum goes from member to member. What this one has to add is kept apart, micro-batch by micro-batch, until the
    sum comes by; only the first one, if there is nothing before it, may add at once. Memory is kept for the next step.
    """

    def __init__(self, line: Line, parameters: Sequence[nn.Parameter]) -> None:
        self._line = line
        self._parameters = parameters
        self._came: bytearray | None = None
        self._at_once = False
        self._kept: list[tuple[int, Gradients]] = []
        self._sets: list[list[torch.Tensor | None]] = []

    def begin(self, before: int, *, first: bool) -> None:
        """A step begins; ``first``: the sum begins here, and is known to begin with something, or nothing."""
        self._kept.clear()
        self._came = self._line.courier.take(before, "team/present", self._line.timeout) if first else None
        self._at_once = self._came is not None and not any(self._came)

    def keep(self, microbatch: int) -> None:
        """Take the gradients of a micro-batch, whose backward has just been done, out of the parameters."""
        if self._at_once:
            return
        mine = self._memory(len(self._kept))
        found: Gradients = []
        for at, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                # into memory that was touched before: gradients that are held would be fresh pages every time
                kept = mine[at]
                if kept is None:
                    kept = mine[at] = torch.empty_like(gradient, memory_format=torch.contiguous_format)
                gradient = kept.copy_(gradient)
            found.append(gradient)
        self._kept.append((microbatch, found))

    def _memory(self, number: int) -> list[torch.Tensor | None]:
        while len(self._sets) <= number:
            self._sets.append([None] * len(self._parameters))
        return self._sets[number]

    def add_up(self, before: int, after: int | None) -> Gradients:
        """Take the sum from one rank, add to it, and give it to another; return it."""
        came = self._came
        if came is None:
            came = self._line.courier.take(before, "team/present", self._line.timeout)
        if self._at_once:
            ours = [[parameter.grad for parameter in self._parameters]]
            for parameter in self._parameters:
                parameter.grad = None
        else:
            ours = [found for _, found in sorted(self._kept, key=lambda each: each[0])]
        present = bytes(bool(flag) or any(each[at] is not None for each in ours) for at, flag in enumerate(came))
        if after is not None:
            self._line.courier.send(after, "team/present", memoryview(present), stays=True)
        sums: Gradients = []
        incoming = self._memory(len(self._kept))
        for at, parameter in enumerate(self._parameters):
            total = None
            if came[at]:
                total = incoming[at]
                if total is None:
                    total = incoming[at] = torch.empty_like(parameter, memory_format=torch.contiguous_format).detach()
                self._line.receive(before, f"sum/{at}", total)
            for each in ours:
                gradient = each[at]
                if gradient is not None:
                    total = gradient if total is None else total.add_(gradient)
            if total is not None and after is not None:
                self._line.send(after, f"sum/{at}", total)
            sums.append(total)
        return sums


def as_tuple(output: Any) -> tuple[torch.Tensor, ...]:
    """Return a stage's output as torch's pipelines see it."""
    return tuple(output) if isinstance(output, (list, tuple)) else (output,)


def digest(tensors: Sequence[torch.Tensor | None]) -> str:
    """Return a short name for tensors: which there are, their kind, their bytes."""
    found = xxhash.xxh3_128()
    for tensor in tensors:
        found.update(b"-" if tensor is None else repr((tensor.shape, tensor.dtype)).encode())
        if tensor is not None:
            found.update(memory_of(tensor.contiguous()))
    return found.hexdigest()


def here() -> tuple[str, int]:
    """Return a name of this machine, and for how many ranks with as many threads as this one it has cores."""
    cores = len(os.sched_getaffinity(0))
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), cores // torch.get_num_threads()


def free_memory() -> int:
    """Return how many bytes this machine has left."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def autocast(setting: Sequence[Any]) -> Any:
    """Return the context in which the owner's script runs its schedule."""
    enabled, dtype, cached = setting
    return torch.autocast("cpu", enabled=enabled, dtype=dtype, cache_enabled=cached)


@dataclass(frozen=True)
class Computed:
    """A micro-batch after its forward, ready for its backward."""

    args: tuple[Any, ...]
    outputs: tuple[torch.Tensor, ...]
    is_tuple: bool
    random_after: str
    """Where the generator stands: see ``fingerprint``."""
    setting: Sequence[Any]
    """How the script runs its schedule, backwards included: see ``autocast``."""

    def leaves(self) -> list[torch.Tensor]:
        """Return the outputs without what they were computed from."""
        return [output.detach().requires_grad_(output.requires_grad) for output in self.outputs]


class Stagehand:
    """Computes single micro-batches of stages, whoever's they are."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = modules
        self.parameters = [parameter for module in modules for parameter in module.parameters()]

    def forward(self, stage: int, given: dict[str, Any], setting: Sequence[Any]) -> Computed:
        """Run forward from the random numbers that the micro-batch begins with."""
        torch.set_rng_state(given["random"])
        args = tuple(given["args"])
        with torch.enable_grad(), autocast(setting):
            output = self.modules[stage](*args, **given["kwargs"])
        after = fingerprint(torch.get_rng_state())
        return Computed(args, as_tuple(output), isinstance(output, (list, tuple)), after, setting)

    def backward(self, computed: Computed, given: Sequence[torch.Tensor | None]) -> Gradients:
        """Run backward; return the gradients of the inputs. Those of the parameters are left in them."""
        pairs = [(o, g) for o, g in zip(computed.outputs, given, strict=True) if o.requires_grad and g is not None]
        if pairs:
            with autocast(computed.setting):
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return [arg.grad if isinstance(arg, torch.Tensor) and arg.requires_grad else None for arg in computed.args]

    def probe(self, stage: int, given: dict[str, Any], setting: Sequence[Any]) -> str:
        """Return a name for what comes out of a micro-batch's forward and backward; leave gradients as they are."""
        with self._gradients_aside():
            computed = self.forward(stage, {**given, "args": tuple(map(_apart, given["args"]))}, setting)
            gradients = given["gradients"]
            if gradients is None:  # the last stage's, whose loss is not to be computed for this
                gradients = [_uneven(output) for output in computed.outputs]
            back = self.backward(computed, [_apart(gradient) for gradient in gradients])
            return digest([*computed.outputs, *back, *(parameter.grad for parameter in self.parameters)])

    @contextlib.contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Take gradients away for a while: what the script has left there is to be added to, by the step itself."""
        left = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(self.parameters, left, strict=True):
                parameter.grad = gradient


def _apart(given: Any) -> Any:
    """Return what is given in memory of its own: a probe must leave no trace in what the step begins with."""
    return given.detach().clone().requires_grad_(given.requires_grad) if isinstance(given, torch.Tensor) else given


def _uneven(output: torch.Tensor) -> torch.Tensor:
    """Return a gradient to probe with. Softmax and normalisation would make nothing of ones."""
    return (torch.arange(output.numel()) % 7 - 3).to(output.dtype).view(output.shape)


class Helper:
    """Serves one owner until that says that it is done."""

    def __init__(self, line: Line, owner: int, build_stage: BuildStage) -> None:
        self._line = line
        self._owner = owner
        self._build_stage = build_stage
        self._hand = Stagehand([])
        self._adder = Adder(line, [])

    def serve(self) -> None:
        """Do what the owner says until its end; leaves this process's random numbers elsewhere than they were."""
        order = self._order()
        while order["do"] != "end":
            match order["do"]:
                case "build":
                    self._tell("ready", [self._build(order), *here()])
                case "probe":
                    self._load(order)
                    self._tell("probe", self._probe(order))
                case "step":
                    self._load(order)
                    testing.point("helping", order["step"])
                    self._step(order)
            order = self._order()
        self._line.courier.flush()

    def _order(self) -> Any:
        """Wait for what to do next; a long time if the owner is slow, but not past the end of the generation."""
        return Line(self._line.courier, ORDERS_WITHIN).hear(self._owner, "order")

    def _tell(self, what: str, value: Any) -> None:
        self._line.tell(self._owner, what, value)

    def _hear(self, what: str) -> Any:
        return self._line.hear(self._owner, what)

    def _probe(self, order: dict[str, Any]) -> list[str] | str:
        """Return names of what comes out of the micro-batches that are asked for, or why nothing does."""
        try:
            given = [self._hear(f"in/{stage}/{microbatch}") for stage, microbatch in order["tasks"]]
            tasks = zip(order["tasks"], given, strict=True)
            return [self._hand.probe(task[0], each, order["autocast"]) for task, each in tasks]
        except PeerLost:
            raise
        except Exception as error:  # noqa: BLE001 (the script's own module: the owner goes on without this rank)
            return f"its forward or backward raised {type(error).__name__}: {error}"

    def _build(self, order: dict[str, Any]) -> str:
        """Build the owner's stages; return why this rank cannot help, or nothing."""
        try:
            modules = [self._build_stage(index) for index in order["stages"]]
        except Exception as error:  # noqa: BLE001 (the script's own function: the owner goes on without this rank)
            return f"build_stage raised {type(error).__name__}: {error}"
        if describe(modules) != order["like"]:
            return "build_stage gives something else than the stage: other parameters, buffers, parts or hooks"
        if torch.get_num_threads() != order["threads"]:
            return f"it computes with {torch.get_num_threads()} threads, the lost rank with {order['threads']}"
        self._hand = Stagehand(modules)
        for parameter in self._hand.parameters:
            parameter.grad = None  # build_stage may have tried it out
        self._adder = Adder(self._line, self._hand.parameters)
        return ""

    def _load(self, order: dict[str, Any]) -> None:
        """Take over the owner's parameters, and pass them on."""
        self._line.courier.flush()  # what was sent last may still lie in the memory that is written now
        for module, flags in zip(self._hand.modules, order["training"], strict=True):
            for part, training in zip(module.modules(), flags, strict=True):
                part.training = training
        for parameter, flag in zip(self._hand.parameters, order["requires_grad"], strict=True):
            parameter.requires_grad_(flag)
        for at, tensor in enumerate(state_of(self._hand.modules)):
            if tensor.numel() and order["load"]:
                self._line.receive(order["from"], f"state/{at}", tensor)
                if order["state_to"] is not None:
                    self._line.send(order["state_to"], f"state/{at}", tensor)

    def _step(self, order: dict[str, Any]) -> None:
        self._adder.begin(order["from"], first=order["from"] == self._owner)
        waiting = []
        for stage, microbatch in order["tasks"]:
            given, computed = self._forward((stage, microbatch), order)
            self._tell(f"out/{stage}/{microbatch}", [computed.leaves(), computed.is_tuple, computed.random_after])
            if given["gradients"] is None:
                waiting.append((stage, microbatch, computed))
            else:
                self._backward(stage, microbatch, computed, given["gradients"])
        for stage, microbatch, computed in waiting:  # of the last stage, whose owner computes the loss
            heard = self._hear(f"gradient/{stage}/{microbatch}")
            self._backward(stage, microbatch, computed, heard)
        self._adder.add_up(order["from"], order["sum_to"])

    def _forward(self, task: Sequence[int], order: dict[str, Any]) -> tuple[dict[str, Any], Computed]:
        given = self._hear(f"in/{task[0]}/{task[1]}")
        return given, self._hand.forward(task[0], given, order["autocast"])

    def _backward(self, stage: int, microbatch: int, computed: Computed, given: Gradients) -> None:
        self._tell(f"back/{stage}/{microbatch}", self._hand.backward(computed, given))
        self._adder.keep(microbatch)
