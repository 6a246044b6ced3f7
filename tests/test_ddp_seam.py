"""The private parts of DDP that regrow relies on: if one of these fails with a new PyTorch, look at regrow/ddp.py."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.ddp import REDUCER_METHODS, Buckets, after_backward, find_ddp
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


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.02)


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
