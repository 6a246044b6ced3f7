"""Look on while a pipeline's schedule does a step: in which order it receives and computes, what it leaves behind.

What is seen says whether the micro-batches of such a step could be computed in another order, and elsewhere.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from regrow.run.draws import Draws
from regrow.run.helping import as_tuple, digest, state_of
from regrow.state import codec
from regrow.state.kinds import why_not_tensor

Task = tuple[int, int]
"""A stage, by its place among those of the rank, and a micro-batch."""


class Observed:
    """How the schedule went about a step, and what its micro-batches did."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self._stages = stages
        self.receives: list[tuple[str, Task]] = []
        self.forwards: list[Task] = []
        self.draws: dict[int, Draws] = {}
        self.why_not = ""
        self._backwards: dict[int, list[int]] = {}
        self._random = torch.get_rng_state()
        """Where torch's generator must stand if nothing but forwards draws from it."""
        parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            self.refuse("two stages on one rank share a parameter")
        if any(tensor.device.type != "cpu" for tensor in state_of([stage.submod for stage in stages])):
            self.refuse("only stages in host memory can be shared yet")
        if not all(map(_is_plain, state_of([stage.submod for stage in stages]))):
            self.refuse("a parameter or buffer is not contiguous")
        if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters):
            self.refuse("a parameter has a hook on its accumulated gradient")
        for stage in stages:
            if isinstance(stage.submod, DistributedDataParallel):
                self.refuse("DistributedDataParallel sums gradients with replicas in the middle of it")
            if stage.dw_builder is not None:
                self.refuse("its schedule computes weights' gradients apart")

    def refuse(self, why: str) -> None:
        """It cannot be shared: the first reason counts."""
        self.why_not = self.why_not or why

    @contextlib.contextmanager
    def looking_on(self) -> Iterator[None]:
        """Look on while a step is done."""
        self._random = torch.get_rng_state()
        replaced = [
            (stage, name, make)
            for number, stage in enumerate(self._stages)
            for name, make in (
                ("forward_one_chunk", self._forward(number, stage)),
                ("backward_one_chunk", self._backward(number, stage)),
                ("get_fwd_recv_ops", self._receive("forward", number)),
                ("get_bwd_recv_ops", self._receive("backward", number)),
                ("set_local_fwd_input", self._unshareable("two neighbouring stages are on one rank")),
                ("backward_weight_one_chunk", self._unshareable("its schedule computes weights' gradients apart")),
            )
        ]
        with instead(replaced):
            yield
        self._check_random()
        if any(order != sorted(order) for order in self._backwards.values()):
            self.refuse("its schedule does the backwards in another order than the forwards")
        if any(draws.generators for draws in self.draws.values()):
            self.refuse("its forward draws random numbers from a generator of its own")

    def _check_random(self) -> None:
        if not torch.equal(self._random, torch.get_rng_state()):
            self.refuse("something else than its forward draws random numbers in a step, the loss perhaps")

    def _forward(self, number: int, stage: Any) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def forward(microbatch: int, args: Any, kwargs: Any = None, **more: Any) -> Any:
                self.forwards.append((number, microbatch))
                self._check_random()
                if number in self.draws or self.why_not:
                    output = original(microbatch, args, kwargs, **more)
                    self._random = torch.get_rng_state()
                    return output
                if any(each.requires_grad for each in _tensors([args if stage.is_first else (), kwargs])):
                    self.refuse("its inputs need gradients themselves, which would stay with a helper")
                given = [args if stage.is_first else _received(stage.args_recv_info[microbatch]), kwargs or {}]
                sent = self._sent(given)
                buffers = [buffer.clone() for buffer in stage.submod.buffers()]
                parameters = digest([parameter.detach() for parameter in stage.submod.parameters()])
                others = _other_random()
                self.draws[number] = Draws()
                with self.draws[number]:
                    output = original(microbatch, args, kwargs, **more)
                self._random = torch.get_rng_state()
                self._check_output(stage, output)
                if sent != self._sent(given):
                    self.refuse("its forward writes to its inputs")
                if not _same(buffers, list(stage.submod.buffers())):
                    self.refuse("its forward writes to buffers, in the order of the micro-batches")
                if parameters != digest([parameter.detach() for parameter in stage.submod.parameters()]):
                    self.refuse("its forward writes to parameters")
                if others != _other_random():
                    self.refuse("its forward draws random numbers from others than torch's generator")
                return output

            return forward

        return make

    def _sent(self, given: Any) -> bytes:
        """Return inputs as they would be sent."""
        try:
            record = codec.encode(given)
        except ValueError as error:
            self.refuse(f"its inputs cannot be sent: {error}")
            return b""
        if not all(each.is_contiguous() for each in _tensors(given)):
            self.refuse("its inputs are not contiguous")
        return record

    def _check_output(self, stage: Any, output: Any) -> None:
        if isinstance(output, (list, tuple)) and type(output) is not tuple:
            self.refuse(f"it gives a {type(output).__name__} of tensors: only plain tuples are sent back as they are")
        outputs: tuple[Any, ...] = as_tuple(output)
        for each in outputs:
            if type(each) not in (torch.Tensor, torch.nn.Parameter):
                self.refuse("it gives something else than tensors")
            elif not _is_plain(each):
                self.refuse("its output is not contiguous")
            elif stage.is_last and each.requires_grad:
                each.register_hook(self._check_gradient)  # as the loss gives it, before it lies anywhere

    def _check_gradient(self, gradient: torch.Tensor) -> None:
        if not _is_plain(gradient):
            self.refuse("a gradient is not contiguous")

    def _backward(self, number: int, stage: Any) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def backward(microbatch: int, loss: Any = None, full_backward: bool = True, *args: Any, **more: Any) -> Any:
                if not full_backward:
                    self.refuse("its schedule computes weights' gradients apart")
                first = number not in self._backwards
                self._backwards.setdefault(number, []).append(microbatch)
                before = torch.get_rng_state()
                do = partial(original, microbatch, loss, full_backward, *args, **more)
                result = self._look_at_backward(stage, microbatch, do) if first and not self.why_not else do()
                if not torch.equal(before, torch.get_rng_state()):
                    self.refuse("its backward draws random numbers")
                return result

            return backward

        return make

    def _look_at_backward(self, stage: Any, microbatch: int, do: Callable[[], Any]) -> Any:
        """Do a stage's first backward; what it is given lies in memory that a shared step reads more than once."""
        given = () if stage.is_last else _received(stage.grad_recv_info[microbatch])
        before, others = digest(given), _other_random()
        draws = Draws()
        with draws:
            result = do()
        if draws.generators or others != _other_random():
            self.refuse("its backward draws random numbers")
        if before != digest(given):
            self.refuse("its backward writes to the gradients that it is given")
        for parameter in stage.submod.parameters():
            if parameter.grad is not None:
                self._check_gradient(parameter.grad)
                if parameter.grad.dtype != parameter.dtype:
                    self.refuse("a gradient is of another type than its parameter")
        return result

    def _receive(self, kind: str, number: int) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def ops(microbatch: int) -> Any:
                self.receives.append((kind, (number, microbatch)))
                return original(microbatch)

            return ops

        return make

    def _unshareable(self, why: str) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.refuse(why)
                return original(*args, **kwargs)

            return call

        return make


@contextlib.contextmanager
def instead(replaced: Sequence[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Put functions in place of objects' methods: ``make(original)`` gives each. Those of the script come back."""
    own = [vars(owner).get(name) for owner, name, _ in replaced]
    for owner, name, make in replaced:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for (owner, name, _), before in zip(replaced, own, strict=True):
            if before is not None:
                setattr(owner, name, before)
            else:
                with contextlib.suppress(AttributeError):
                    delattr(owner, name)  # the class's own shows again


def _other_random() -> bytes:
    """Return the state of the generators that are not torch's."""
    return codec.encode([random.getstate(), np.random.get_state(legacy=False)])


def _tensors(given: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


def _received(infos: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """Return what a stage was sent; detached, since the stage itself will say that gradients are needed."""
    return tuple(info.buffer.detach() for info in infos if info.buffer is not None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes, one after the other, are all there is to it: sparse ones have no such memory."""
    return why_not_tensor(tensor) is None and tensor.is_contiguous()


def _same(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Whether there are as many as there were, and alike."""
    return len(before) == len(after) and all(map(torch.equal, before, after))
