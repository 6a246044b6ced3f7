"""The private parts of DDP that regrow relies on: if one of these fails with a new PyTorch, look at regrow/ddp.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.ddp import REDUCER_METHODS, Bucket, Buckets, Reductions, after_backward, find_ddp
from regrow.group import Fabric, Mode


@pytest.fixture
def fabric():
    store = dist.HashStore()
    fabric = Fabric(rank=0, world_size=1, generation=0, store=store, timeout=timedelta(seconds=30), mode=Mode.LIVE)
    fabric.install()
    dist.init_process_group("regrow", store=store, rank=0, world_size=1)
    yield fabric
    dist.destroy_process_group()
    fabric.close()


def wrapped(view: bool = False) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02, gradient_as_bucket_view=view)


def step(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(2, 64)).sum().backward()


def test_the_reducer_has_what_is_used(fabric):
    ddp = wrapped()
    assert all(hasattr(ddp.reducer, name) for name in REDUCER_METHODS)
    assert find_ddp(nn.ModuleList([ddp])) == [ddp]


def test_the_layout_is_learnt_at_the_second_forward_and_given_to_a_new_reducer(fabric):
    ddp = wrapped()
    buckets = Buckets(ddp, fabric)
    step(ddp)
    assert buckets.layout is None
    step(ddp)
    assert buckets.layout is not None
    assert ddp._has_rebuilt_buckets
    other = wrapped()
    twin = Buckets(other, fabric)
    twin.apply(buckets.layout)
    assert other._has_rebuilt_buckets
    step(other)
    step(other)
    assert twin.layout == buckets.layout


def layout_of(ddp: DistributedDataParallel) -> list[list[int]]:
    """Return the layout that the reducer has at this moment."""
    order = [id(param) for param in ddp.parameters()]
    buckets = [[order.index(id(param)) for param in b.parameters()] for b in ddp.reducer._get_zeros_like_grad_buckets()]
    return [[*(index for bucket in buckets for index in bucket), len(buckets)], [len(bucket) for bucket in buckets]]


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_buckets_can_be_settled_after_backward_and_go_back_to_the_first(fabric, view):
    ddp = wrapped(view)
    buckets = Buckets(ddp, fabric)
    first = layout_of(ddp)
    buckets.start()
    buckets.settle()
    assert buckets.layout is None  # there was no backward yet
    step(ddp)
    gradients = [param.grad.clone() for param in ddp.parameters()]
    buckets.settle()
    assert buckets.layout == layout_of(ddp) != first
    assert all(torch.equal(param.grad, grad) for param, grad in zip(ddp.parameters(), gradients, strict=True))
    settled = buckets.layout
    step(ddp)
    assert buckets.layout == layout_of(ddp) == settled
    ddp.zero_grad()
    buckets.abandon()
    assert buckets.layout is None
    assert layout_of(ddp) == first
    assert not ddp._has_rebuilt_buckets
    step(ddp)
    assert layout_of(ddp) == first
    step(ddp)
    assert buckets.layout == layout_of(ddp) == settled


@pytest.mark.parametrize("view", [False, True], ids=["copies", "views"])
def test_buckets_that_were_taken_within_a_step_are_not_those_it_goes_back_to(fabric, view):
    """Rank 0 may have seen the gradients in another order: its buckets count, but from the rebuilding on."""
    ddp = wrapped(view)
    buckets = Buckets(ddp, fabric)
    first = layout_of(ddp)
    buckets.start()
    step(ddp)
    buckets.settle()
    assert buckets.layout is not None
    gradients = [param.grad.clone() for param in ddp.parameters()]
    others = [[*reversed(buckets.layout[0][:-1]), buckets.layout[0][-1]], buckets.layout[1]]
    buckets.apply(others)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(ddp.parameters(), gradients, strict=True))
    step(ddp)
    assert buckets.layout == layout_of(ddp) == others
    ddp.zero_grad()
    buckets.abandon()
    assert buckets.layout is None
    assert layout_of(ddp) == first
    buckets.apply(others)
    buckets.start()
    buckets.abandon()
    assert buckets.layout == layout_of(ddp) == others


def test_a_backward_that_leaves_parameters_out_is_ddps_to_tell(fabric):
    ddp = wrapped()
    buckets = Buckets(ddp, fabric)
    ddp(torch.ones(2, 64)).sum()
    ddp.module[0](torch.ones(2, 64)).sum().backward()
    buckets.settle()
    assert buckets.layout is None
    with pytest.raises(RuntimeError, match="finished reduction"):
        step(ddp)


def test_an_interrupted_backward_is_forgotten(fabric):
    ddp = wrapped()
    buckets = Buckets(ddp, fabric)
    step(ddp)
    step(ddp)

    def fail(grad):
        raise ValueError("in the middle of backward")

    handle = next(iter(ddp.parameters())).register_hook(fail)
    with pytest.raises(ValueError, match="middle"):
        step(ddp)
    handle.remove()
    ddp.zero_grad()
    layout = buckets.layout
    buckets.apply(layout)
    step(ddp)
    step(ddp)
    assert buckets.layout == layout


def test_after_backward_comes_after_ddps_own_end(fabric):
    ddp = wrapped()
    seen = []

    def hook(state, bucket):
        if bucket.is_last():
            after_backward(lambda: seen.append([p.grad is not None for p in ddp.parameters()]))
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    step(ddp)
    assert seen == [[True] * 8]


class Heard:
    """What a listener was told in one backward, and whether the gradients were right when backward was over."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.right: list[bool] = []

    def reducing(self, bucket: Bucket) -> None:
        self.told.append(("reducing", bucket.index))

    def issued(self, bucket: Bucket, gradients: list[torch.Tensor], work: dist.Work) -> None:
        self.told.append(("issued", bucket.index))
        pairs = list(zip(bucket.params, gradients, strict=True))
        after_backward(lambda: self.right.append(all(torch.equal(param.grad, grad) for param, grad in pairs)))


def listened(ddp: DistributedDataParallel, fabric: Fabric) -> tuple[Buckets, Heard]:
    buckets, heard = Buckets(ddp, fabric), Heard()
    Reductions(ddp, buckets, heard)
    return buckets, heard


def test_reductions_are_told_from_the_third_backward_on(fabric):
    """The first one comes before buckets are rebuilt, in the second one their buffers are learnt."""
    ddp = wrapped()
    buckets, heard = listened(ddp, fabric)
    step(ddp)
    step(ddp)
    assert heard.told == []
    step(ddp)
    count = len(buckets.contents())
    assert count >= 2
    assert heard.told == [(what, index) for index in range(count) for what in ("reducing", "issued")]
    assert heard.right == [True] * count
    held = [param for bucket in buckets.contents() for param in bucket.params]
    assert {id(param) for param in held} == {id(param) for param in ddp.parameters()}


def test_gradients_that_lie_in_another_order(fabric):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    ddp = DistributedDataParallel(model)
    _, heard = listened(ddp, fabric)
    for _ in range(3):
        ddp(torch.ones(2, 3, 9, 9)).sum().backward()
    assert heard.right == [True]


def test_a_sum_of_the_users_is_not_taken_for_a_bucket(fabric):
    ddp = wrapped()
    buckets, heard = listened(ddp, fabric)
    step(ddp)
    ddp(torch.ones(2, 64))
    sizes = [bucket.numel() for bucket in buckets.contents()]
    mine = [torch.full((size,), 7.0) for size in sizes]
    for param in ddp.parameters():  # before, between and after DDP's own
        param.register_hook(lambda grad: [dist.all_reduce(tensor) for tensor in mine] and None)
    ddp.zero_grad()
    step(ddp)
    dist.all_reduce(mine[0])
    assert heard.told == []
    step(ddp)
    assert len(heard.told) == 2 * len(sizes)
    assert heard.right == [True] * len(sizes)


def test_new_buckets_are_learnt_anew_also_after_an_interruption(fabric):
    ddp = wrapped()
    buckets, heard = listened(ddp, fabric)
    for _ in range(3):
        step(ddp)
    heard.told.clear()
    buckets.apply(buckets.layout)

    def fail(grad):
        raise ValueError("in the middle of backward")

    handle = next(iter(ddp.parameters())).register_hook(fail)
    with pytest.raises(ValueError, match="middle"):
        step(ddp)
    handle.remove()
    buckets.apply(buckets.layout)
    step(ddp)
    assert heard.told == []
    step(ddp)
    assert len(heard.told) == 2 * len(buckets.contents())


def test_what_changes_the_gradients_is_refused(fabric):
    hooked = wrapped()
    hooked.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ValueError, match="communication hook"):
        listened(hooked, fabric)
    foreign = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group(backend="gloo"))
    with pytest.raises(ValueError, match="process group that regrow did not make"):
        listened(foreign, fabric)
