"""Compute micro-batches of another rank's stage while this rank has nothing else to do.

This rank's own state stays where it is: the other's stage is built beside it, by the script's own ``build_stage``, and
is thrown away in the end. What is computed is what the owner asks for: forward, backward, and the sum of the gradients
of all micro-batches, added one after the other in the order of the micro-batches: its bits are those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import xxhash
from torch import nn

from regrow import testing
from regrow.courier import Courier, memory_of
from regrow.run.draws import fingerprint
from regrow.state import codec

BuildStage = Callable[[int], nn.Module]
Gradients = list[torch.Tensor | None]


class Line:
    """Structured messages to and from the ranks of a team, over the courier."""

    def __init__(self, courier: Courier, timeout: timedelta) -> None:
        self.courier = courier
        self.timeout = timeout

    def tell(self, peer: int, what: str, value: Any) -> None:
        """Send plain data and tensors."""
        self.courier.send(peer, f"team/{what}", memoryview(codec.encode(value)), stays=True)

    def hear(self, peer: int, what: str) -> Any:
        """Wait for what ``tell`` sent."""
        return codec.decode(self.courier.take(peer, f"team/{what}", self.timeout))

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
    """Return what must be alike for two stages to compute the same."""
    return [
        [
            [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        ]
        for module in modules
    ]


def add_up(
    line: Line,
    before: int,
    after: int | None,
    parameters: Sequence[nn.Parameter],
    ours: Sequence[Gradients],
    buffers: list[torch.Tensor | None],
) -> Gradients:
    """Add this rank's gradients, one micro-batch after the other, to the sum that goes from rank to rank."""
    came = line.courier.take(before, "team/present", line.timeout)
    present = bytes(bool(came[at]) or any(each[at] is not None for each in ours) for at in range(len(parameters)))
    if after is not None:
        line.courier.send(after, "team/present", memoryview(present), stays=True)
    sums: Gradients = []
    for at, parameter in enumerate(parameters):
        total = None
        if present[at]:
            total = buffers[at]
            if total is None:
                total = buffers[at] = torch.empty_like(parameter, memory_format=torch.contiguous_format).detach()
            if came[at]:
                line.receive(before, f"sum/{at}", total)
            begun = bool(came[at])
            for each in ours:
                gradient = each[at]
                if gradient is not None:
                    total.add_(gradient) if begun else total.copy_(gradient)
                    begun = True
            if after is not None:
                line.send(after, f"sum/{at}", total)
        sums.append(total)
    return sums


def as_tuple(output: Any) -> tuple[torch.Tensor, ...]:
    """Return a stage's output as torch's pipelines see it."""
    return tuple(output) if isinstance(output, (list, tuple)) else (output,)


def digest(outputs: Sequence[torch.Tensor]) -> str:
    """Return a short name for a stage's outputs."""
    found = xxhash.xxh3_128()
    for output in outputs:
        found.update(memory_of(output.contiguous()))
    return found.hexdigest()


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
        return Computed(args, as_tuple(output), isinstance(output, (list, tuple)), after)

    def backward(self, computed: Computed, given: Sequence[torch.Tensor | None]) -> tuple[Gradients, Gradients]:
        """Run backward; return the gradients of the inputs and those of the parameters."""
        pairs = [(o, g) for o, g in zip(computed.outputs, given, strict=True) if o.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        back = [arg.grad if isinstance(arg, torch.Tensor) and arg.requires_grad else None for arg in computed.args]
        found = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return back, found


class Helper:
    """Serves one owner until that says that it is done."""

    def __init__(self, line: Line, owner: int, build_stage: BuildStage) -> None:
        self._line = line
        self._owner = owner
        self._build_stage = build_stage
        self._hand = Stagehand([])
        self._sums: list[torch.Tensor | None] = []

    def serve(self) -> None:
        """Do what the owner says until its end; leaves this process's random numbers elsewhere than they were."""
        order = self._hear("order")
        while order["do"] != "end":
            match order["do"]:
                case "build":
                    self._tell("ready", self._build(order))
                case "probe":
                    self._load(order)
                    self._tell("probe", [digest(self._forward(task, order)[1].outputs) for task in order["tasks"]])
                case "step":
                    self._load(order)
                    testing.point("helping", order["step"])
                    self._step(order)
            order = self._hear("order")
        self._line.courier.flush()

    def _tell(self, what: str, value: Any) -> None:
        self._line.tell(self._owner, what, value)

    def _hear(self, what: str) -> Any:
        return self._line.hear(self._owner, what)

    def _build(self, order: dict[str, Any]) -> str:
        """Build the owner's stages; return why this rank cannot help, or nothing."""
        try:
            modules = [self._build_stage(index) for index in order["stages"]]
        except Exception as error:  # noqa: BLE001 (the script's own function: the owner goes on without this rank)
            return f"build_stage raised {type(error).__name__}: {error}"
        if describe(modules) != order["like"]:
            return "build_stage gives other parameters or buffers than the stage has"
        if torch.get_num_threads() != order["threads"]:
            return f"it computes with {torch.get_num_threads()} threads, the lost rank with {order['threads']}"
        self._hand = Stagehand(modules)
        self._sums = [None] * len(self._hand.parameters)
        return ""

    def _load(self, order: dict[str, Any]) -> None:
        """Take over the owner's parameters, and pass them on."""
        self._line.courier.flush()  # what was sent last may still lie in the memory that is written now
        for module, flags in zip(self._hand.modules, order["training"], strict=True):
            for part, training in zip(module.modules(), flags, strict=True):
                part.training = training
        for at, tensor in enumerate(state_of(self._hand.modules)):
            if tensor.numel():
                self._line.receive(order["from"], f"state/{at}", tensor)
                if order["state_to"] is not None:
                    self._line.send(order["state_to"], f"state/{at}", tensor)

    def _step(self, order: dict[str, Any]) -> None:
        gradients: dict[tuple[int, int], Gradients] = {}
        waiting = []
        for stage, microbatch in order["tasks"]:
            given, computed = self._forward((stage, microbatch), order)
            self._tell(f"out/{stage}/{microbatch}", [computed.leaves(), computed.is_tuple, computed.random_after])
            if given["gradients"] is None:
                waiting.append((stage, microbatch, computed))
            else:
                gradients[stage, microbatch] = self._backward(stage, microbatch, computed, given["gradients"])
        for stage, microbatch, computed in waiting:  # of the last stage, whose owner computes the loss
            heard = self._hear(f"gradient/{stage}/{microbatch}")
            gradients[stage, microbatch] = self._backward(stage, microbatch, computed, heard)
        ours = [gradients[key] for key in sorted(gradients, key=lambda key: key[1])]
        add_up(self._line, order["from"], order["sum_to"], self._hand.parameters, ours, self._sums)

    def _forward(self, task: Sequence[int], order: dict[str, Any]) -> tuple[dict[str, Any], Computed]:
        given = self._hear(f"in/{task[0]}/{task[1]}")
        return given, self._hand.forward(task[0], given, order["autocast"])

    def _backward(self, stage: int, microbatch: int, computed: Computed, given: Gradients) -> Gradients:
        back, found = self._hand.backward(computed, given)
        self._tell(f"back/{stage}/{microbatch}", back)
        return found
