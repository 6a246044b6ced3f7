"""What a step looks like that cannot be shared, on real stages of torch, and what is said about it.

Each refusal has a step that differs in nothing else from one that is not refused.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining.stage import InferenceMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from regrow.run.helping import Helper, Stagehand, describe
from regrow.run.observed import Observed
from regrow.run.sharing import Sharing

WIDTH = 4
CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Part(nn.Module):
    """A linear layer with something before and after it."""

    def __init__(self, after: Callable[..., Any] = lambda out: out, before: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(1))
        self.before, self.after = before, after

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self.after(self.linear(self.before(x)) * self.scale)


def squares(out: Any, target: torch.Tensor) -> torch.Tensor:
    return (as_tensor(out) - target).square().mean()


def as_tensor(out: Any) -> torch.Tensor:
    out = next(iter(out.values())) if isinstance(out, dict) else out
    out = out[0] if isinstance(out, (tuple, list)) else out
    return out.to_dense() if out.layout is not torch.strided else out


def whole(module: nn.Module, loss_fn: Callable[..., torch.Tensor] = squares, x: torch.Tensor = X, **kwargs: Any) -> str:
    """Why a step of a pipeline of one stage cannot be shared."""
    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, CPU), 2, loss_fn=loss_fn)
    schedule._merge_outputs = lambda outputs: None  # it takes tensors only, after the step
    schedule.step(x, target=X, **kwargs)  # the first one learns shapes
    seen = Observed([schedule._stage])
    with seen.looking_on():
        schedule.step(x, target=X, **kwargs)
    return seen.why_not


def middle(module: nn.Module, requires_grad: bool = True, order: tuple[int, ...] = (0, 1)) -> str:
    """Why a step of a stage between two others cannot be shared; what they send lies there already."""
    like = torch.zeros(2, WIDTH, requires_grad=requires_grad)
    out = torch.zeros(2, WIDTH, requires_grad=True)
    grads = like.detach() if requires_grad else None
    stage = PipelineStage(
        module, 1, 3, CPU, input_args=like, output_args=out, output_grads=out.detach(), input_grads=grads
    )
    stage.has_backward = True
    stage._inference_mode = InferenceMode.STATIC
    stage._prepare_forward_infra(2, (), {}, True)
    stage._prepare_backward_infra(2)
    with torch.no_grad():
        for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
            infos[0].buffer.copy_(X[:2])
    seen = Observed([stage])
    with seen.looking_on():
        for microbatch in range(2):
            stage.forward_one_chunk(microbatch, ())
        for microbatch in order:
            stage.backward_one_chunk(microbatch)
    return seen.why_not


# what is not refused --------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout())

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    "module",
    [
        Part(),
        Part(nn.Dropout()),
        Part(lambda out: (out, out.detach() + 1)),
        Checkpointed(),
        Part(lambda out: (out, torch.ones(1, 0))),
    ],
    ids=["plain", "dropout", "tuple", "checkpointed", "empty output"],
)
def test_a_step_that_can_be_shared(module):
    assert whole(module) == ""


def test_a_stage_between_others_can_be_shared():
    assert middle(Part(nn.Dropout())) == ""
    assert middle(Part(), requires_grad=False) == ""


def test_the_stage_is_left_as_it_was():
    stage = PipelineStage(Part(), 0, 1, CPU)
    stage.get_bwd_recv_ops = own = lambda microbatch: []
    with Observed([stage]).looking_on():
        assert "forward_one_chunk" in vars(stage)
    assert stage.get_bwd_recv_ops is own
    assert not {"forward_one_chunk", "backward_one_chunk", "get_fwd_recv_ops", "set_local_fwd_input"} & set(vars(stage))


# the stage, before it has done anything -------------------------------------------------------------------------------


def at_first(*modules: nn.Module) -> str:
    return Observed([PipelineStage(module, at, len(modules), CPU) for at, module in enumerate(modules)]).why_not


def test_two_stages_that_share_a_parameter():
    one, other = Part(), Part()
    assert at_first(one, other) == ""
    other.linear.weight = one.linear.weight
    assert at_first(one, other) == "two stages on one rank share a parameter"


@pytest.mark.parametrize("make", [torch.Tensor.t, torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_parameters_and_buffers_that_are_not_contiguous(make):
    module = Part()
    module.other = nn.Parameter(make(torch.ones(WIDTH, 2)))
    assert at_first(module) == "a parameter or buffer is not contiguous"
    module = Part()
    module.register_buffer("other", make(torch.ones(WIDTH, 2)))
    assert at_first(module) == "a parameter or buffer is not contiguous"


def test_a_hook_on_an_accumulated_gradient():
    module = Part()
    module.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    assert at_first(module) == "a parameter has a hook on its accumulated gradient"


def test_data_parallelism_within_a_stage():
    assert at_first(DistributedDataParallel(Part())).startswith("DistributedDataParallel sums gradients")


def test_a_stage_that_is_not_in_host_memory():
    module = Part()
    module.register_buffer("elsewhere", torch.ones(1, device="meta"))
    assert at_first(module) == "only stages in host memory can be shared yet"


def test_a_stage_with_its_own_way_to_weights_gradients():
    stage = PipelineStage(Part(), 0, 1, CPU, dw_builder=lambda: lambda: None)
    assert Observed([stage]).why_not == "its schedule computes weights' gradients apart"


# the schedule ---------------------------------------------------------------------------------------------------------


def test_backwards_in_another_order():
    assert middle(Part(), order=(1, 0)) == "its schedule does the backwards in another order than the forwards"


def several(kind: type, stages: int) -> str:
    found = [PipelineStage(Part(), at, stages, CPU) for at in range(stages)]
    schedule = kind(found, 2, loss_fn=squares)
    schedule.step(X, target=X)
    seen = Observed(found)
    with seen.looking_on():
        schedule.step(X, target=X)
    return seen.why_not


def test_two_neighbouring_stages_on_one_rank():
    assert several(ScheduleInterleaved1F1B, 1) == ""
    assert several(ScheduleInterleaved1F1B, 2) == "two neighbouring stages are on one rank"


def test_a_split_backward():
    """Either half of it says so."""
    said = "its schedule computes weights' gradients apart"
    assert several(ScheduleInterleavedZeroBubble, 1) == said
    for half in ("backward_one_chunk", "backward_weight_one_chunk"):
        stage = PipelineStage(Part(), 0, 1, CPU)
        seen = Observed([stage])
        with seen.looking_on():
            getattr(stage, half)(0, *([None, False] if half == "backward_one_chunk" else []))
        assert seen.why_not == said


# inputs ---------------------------------------------------------------------------------------------------------------


def test_inputs_that_are_not_contiguous():
    assert whole(Part(), x=X[:, :1].expand(4, WIDTH)) == "its inputs are not contiguous"


def test_inputs_that_cannot_be_sent():
    """Neither sparse tensors nor objects of the script; the step itself is done."""
    assert "its inputs cannot be sent: " in whole(Part(), other=random.Random(1))
    csr = Part(before=lambda x: x.to_dense())
    assert "layout torch.sparse" in one_chunk(csr, X.to_sparse())
    assert "layout torch.sparse_csr" in one_chunk(csr, X.to_sparse_csr())


def one_chunk(module: nn.Module, x: torch.Tensor) -> str:
    """Schedules cannot cut such inputs into micro-batches, but can be given micro-batches."""
    stage = PipelineStage(module, 0, 1, CPU)
    seen = Observed([stage])
    with seen.looking_on():
        stage.forward_one_chunk(0, (x,))
    return seen.why_not


def test_inputs_that_need_gradients():
    """An embedding outside of the stage, say: a helper could not give it any."""
    said = "its inputs need gradients themselves, which would stay with a helper"
    assert whole(Part(), x=X.clone().requires_grad_()) == said
    assert one_chunk(Part(), nn.Linear(WIDTH, WIDTH)(X)) == said
    assert whole(Part(), bias=torch.ones(4, WIDTH, requires_grad=True)) == said


def test_a_forward_that_writes_to_its_inputs():
    """What was received, too: it is read more than once."""
    said = "its forward writes to its inputs"
    assert whole(Part(before=lambda x: x.mul_(0.5).clone()), x=X.clone()) == said
    assert middle(Part(before=lambda x: x.mul_(0.5).clone()), requires_grad=False) == said

    def halve(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return x

    assert middle(Part(before=halve)) == said


# what it leaves behind, what it gives ---------------------------------------------------------------------------------


class Counting(Part):
    """Writes to what it has in many ways."""

    def __init__(self, write: Callable[[Counting], None]) -> None:
        super().__init__()
        self.write = write

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        self.write(self)
        return super().forward(x)


def name_another(module: Counting) -> None:
    module.register_buffer(f"cache{len(list(module.buffers()))}", torch.ones(1))


def grow(module: Counting) -> None:
    module.scale = torch.ones(len(module.scale) + WIDTH - 1 if len(module.scale) == 1 else 1)


@pytest.mark.parametrize(
    "write", [lambda module: module.scale.data.add_(1), name_another, grow], ids=["add", "new", "grow"]
)
def test_a_forward_that_writes_to_buffers(write):
    assert whole(Counting(write)) == "its forward writes to buffers, in the order of the micro-batches"


def test_a_forward_that_writes_to_parameters():
    """Also where autograd cannot know."""
    assert whole(Counting(lambda module: module.linear.weight.data.mul_(0.9))) == "its forward writes to parameters"


Named = collections.namedtuple("Named", ["out"])


class Special(torch.Tensor):
    """Some library's tensor."""


@pytest.mark.parametrize(
    "after, said",
    [
        (lambda out: {"out": out}, "it gives something else than tensors"),
        (lambda out: (out, "and more"), "it gives something else than tensors"),
        (lambda out: out.as_subclass(Special), "it gives something else than tensors"),
        (lambda out: [out], "it gives a list of tensors"),
        (lambda out: Named(out), "it gives a Named of tensors"),
        (lambda out: (out, out.t()), "its output is not contiguous"),
        (lambda out: (out, out.detach().to_sparse()), "its output is not contiguous"),
        (lambda out: (out, out.detach().to_sparse_csr()), "its output is not contiguous"),
    ],
    ids=["dict", "more", "subclass", "list", "named", "transposed", "sparse", "compressed"],
)
def test_outputs(after, said):
    stage = PipelineStage(Part(after), 0, 1, CPU)
    seen = Observed([stage])
    with seen.looking_on():
        stage.forward_one_chunk(0, (X,))
    assert seen.why_not.startswith(said), seen.why_not


# gradients ------------------------------------------------------------------------------------------------------------


def test_a_loss_whose_gradient_is_not_contiguous():
    assert whole(Part(), lambda out, target: out.sum()) == "a gradient is not contiguous"


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, sparse=True)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.table(torch.zeros(len(x), dtype=torch.int64))


def test_a_sparse_gradient():
    assert whole(Looking()) == "a gradient is not contiguous"


def test_a_gradient_of_another_type_than_its_parameter():
    module = Part()
    module.linear.bias.grad_dtype = torch.float64
    assert whole(module) == "a gradient is of another type than its parameter"


class Back(torch.autograd.Function):
    """The identity, with a backward of one's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.backward_ = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.backward_(gradient), None


def test_a_backward_that_writes_to_what_it_is_given():
    module = Part(lambda out: Back.apply(out, lambda gradient: gradient.mul_(0.5)))
    assert middle(module) == "its backward writes to the gradients that it is given"
    module = Part(lambda out: Back.apply(out, lambda gradient: gradient.mul(0.5)))
    assert middle(module) == ""


# random numbers -------------------------------------------------------------------------------------------------------

OWN = torch.Generator()


@pytest.mark.parametrize(
    "draw, said",
    [
        (lambda: torch.rand(1, generator=OWN), "its forward draws random numbers from a generator of its own"),
        (lambda: torch.ones(1).normal_(generator=OWN), "its forward draws random numbers from a generator of its own"),
        (random.random, "its forward draws random numbers from others than torch's generator"),
        (np.random.rand, "its forward draws random numbers from others than torch's generator"),
        (lambda: torch.rand(1), ""),
    ],
    ids=["generator", "in place", "python", "numpy", "torch"],
)
def test_a_forward_that_draws(draw, said):
    assert whole(Part(lambda out: out * float(draw()))) == said


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), lambda: torch.rand(1, generator=OWN), random.random, np.random.rand],
    ids=["torch", "generator", "python", "numpy"],
)
def test_a_backward_that_draws(draw):
    module = Part(lambda out: Back.apply(out, lambda gradient: gradient * float(draw())))
    assert whole(module) == "its backward draws random numbers"


def test_a_loss_that_draws():
    said = "something else than its forward draws random numbers in a step, the loss perhaps"
    assert whole(Part(), lambda out, target: squares(out, target) * torch.rand(1)) == said


# a replay -------------------------------------------------------------------------------------------------------------


class Line:
    """Keeps what helpers are told; they answer what they are given to answer."""

    def __init__(self, *answers: Any) -> None:
        self.told: list[tuple[int, str, Any]] = []
        self.answers = list(answers)
        self.courier = SimpleNamespace(has=lambda peer, what: True, waited_s=0.0, flush=lambda: None)

    def tell(self, peer: int, what: str, value: Any) -> None:
        self.told.append((peer, what, value))

    def hear(self, peer: int, what: str) -> Any:
        return self.answers.pop(0)

    def send(self, peer: int, what: str, tensor: torch.Tensor) -> None:
        pass


class Replay:
    """A replay of a pipeline of one stage; what helpers answer is made up, their messages are not sent."""

    def __init__(self, module: nn.Module, loss_fn: Callable[..., torch.Tensor] | None = squares, *answers: Any) -> None:
        self.said: list[str] = []
        self.line = Line(*answers)
        self.module = module
        self.schedule = ScheduleGPipe(PipelineStage(module, 0, 1, CPU), 2, loss_fn=loss_fn)
        self.sharing = Sharing(
            self.schedule,
            0,
            line=self.line,
            transport=SimpleNamespace(step=0, generation=1),
            helpers=None,
            say=self.said.append,
            event=lambda *args, **kwargs: None,
        )
        self.sharing.begin([1], 10)

    def step(self) -> None:
        self.schedule.step(X, **({} if self.schedule._loss_fn is None else {"target": X}))

    @property
    def ended(self) -> bool:
        return self.line.told[-1] == (1, "order", {"do": "end"})


def test_a_schedule_without_backward():
    replay = Replay(Part(), None)
    replay.step()
    assert replay.said == ["the replay goes on without help: its schedule has no backward"]
    assert replay.ended
    assert replay.sharing.why_not == "its schedule has no backward"


def test_a_refusal_ends_the_help_before_anyone_is_probed():
    replay = Replay(Part(lambda out: out * random.random()))
    replay.step()
    (said,) = replay.said
    assert said.startswith("the replay goes on without help: its forward draws random numbers from others than")
    assert replay.ended and [what for _, what, _ in replay.line.told] == ["order", "order"]


def test_schedules_that_are_built_differently():
    with pytest.raises(RuntimeError, match="built differently"):
        Sharing(object(), 0, line=None, transport=None, helpers=None, say=print, event=print)


def test_a_stage_that_cannot_be_computed_for_comparison_is_replayed_alone():
    """The gradients of a probe are not those of the loss, and a backward may refuse them."""

    def choosy(gradient: torch.Tensor) -> torch.Tensor:
        if gradient.abs().max() > 2:
            raise ValueError("too steep")
        return gradient

    replay = Replay(Part(lambda out: Back.apply(out, choosy)), squares, ["", "here", 1], ["whatever"])
    replay.step()
    assert not replay.said
    replay.step()
    assert replay.ended
    assert "its stage raised ValueError: too steep" in replay.said[0] and len(replay.said) == 1, replay.said


# a helper -------------------------------------------------------------------------------------------------------------


def given(x: torch.Tensor, gradients: list[torch.Tensor] | None) -> dict[str, Any]:
    return {"args": (x,), "kwargs": {}, "gradients": gradients, "random": torch.get_rng_state()}


OFF = [False, torch.bfloat16, True]


def twin(module: Part, after: Callable[..., Any]) -> Part:
    other = Part(after)
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("gradients", [None, [X * 3]], ids=["last stage", "other stage"])
def test_a_probe_sees_forward_and_backward_and_leaves_nothing(gradients):
    module = Part(lambda out: Back.apply(nn.functional.softmax(out, 1), torch.clone))
    same = twin(module, lambda out: Back.apply(nn.functional.softmax(out, 1), torch.clone))
    back = twin(module, lambda out: Back.apply(nn.functional.softmax(out, 1), lambda gradient: gradient * 1.001))
    forth = twin(module, lambda out: Back.apply(nn.functional.softmax(out * 1.001, 1), torch.clone))
    left = [torch.ones_like(parameter) for parameter in module.parameters()]
    for parameter, gradient in zip(module.parameters(), left, strict=True):
        parameter.grad = gradient
    x = X.clone().requires_grad_()

    def probe(module: nn.Module) -> str:
        return Stagehand([module]).probe(0, given(x, gradients), OFF)

    expected = probe(module)
    assert probe(same) == expected
    assert probe(back) != expected and probe(forth) != expected
    for parameter, gradient in zip(module.parameters(), left, strict=True):
        assert parameter.grad is gradient and torch.equal(gradient, torch.ones_like(gradient))
    assert all(parameter.grad is None for parameter in same.parameters())
    assert x.grad is None


def test_a_probe_sees_outputs_and_the_gradients_of_inputs_and_of_parameters():
    """Each of them alone is otherwise in one of these."""
    x = X.clone().requires_grad_()
    hooked, module = Part(), Part()
    hooked.load_state_dict(module.state_dict())
    hooked.linear.weight.register_hook(lambda gradient: gradient * 1.001)
    inputs = Part(before=lambda x: Back.apply(x, lambda gradient: gradient * 1.001))
    inputs.load_state_dict(module.state_dict())
    outputs = twin(module, lambda out: out + 1)
    names = {Stagehand([each]).probe(0, given(x, [X]), OFF) for each in (module, hooked, inputs, outputs)}
    assert len(names) == 4


def test_a_probe_of_the_last_stage_is_not_blind_to_what_even_gradients_hide():
    """A mean in the backward, as of softmax or a normalisation."""
    module = Part(lambda out: Back.apply(out, torch.clone))
    other = twin(module, lambda out: Back.apply(out, lambda gradient: gradient.mean(1, keepdim=True).repeat(1, WIDTH)))
    one, two = (Stagehand([each]).probe(0, given(X, None), OFF) for each in (module, other))
    assert one != two


def test_a_probe_writes_to_nothing_that_the_step_begins_with():
    module = Part(lambda out: Back.apply(out, lambda gradient: gradient.mul_(0.5)), lambda x: x.data.mul_(0.5))
    x, gradient = X.clone(), X.clone()
    Stagehand([module]).probe(0, given(x, [gradient]), OFF)
    assert torch.equal(x, X) and torch.equal(gradient, X)


def helper(module: nn.Module, *answers: Any) -> Helper:
    made = Helper(Line(*answers), 0, lambda index: module)
    order = {"stages": [0], "like": describe([module]), "threads": torch.get_num_threads()}
    assert made._build(order) == ""
    return made


def test_a_helper_with_other_threads():
    module = Part()
    order = {"stages": [0], "like": describe([module]), "threads": torch.get_num_threads() + 1}
    assert "threads, the lost rank with" in Helper(Line(), 0, lambda index: module)._build(order)


def test_what_build_stage_leaves_in_gradients_is_not_added():
    module = Part()
    module(X).sum().backward()
    helper(module)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_helper_whose_stage_raises_says_so_and_keeps_no_gradients():
    order = {"tasks": [[0, 0]], "autocast": OFF}

    def refuse(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("not this one")

    module = Part(lambda out: Back.apply(out, refuse))
    found = helper(module, given(X, None))._probe(order)
    assert found == "its forward or backward raised ValueError: not this one"
    module = Part(before=refuse)
    assert helper(module, given(X, None))._probe(order) == found
    assert all(parameter.grad is None for parameter in module.parameters())
    assert len(helper(Part(), given(X, None))._probe(order)) == 1
