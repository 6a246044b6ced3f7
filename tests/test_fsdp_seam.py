"""What ``fully_shard`` keeps of an iteration, looked at in torch itself: fails when PyTorch builds it differently."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from regrow import fsdp


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Fragile(nn.Module):
    """Fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("interrupted")
        return self.inner(x)


class FragileBackward(torch.autograd.Function):
    """Fails on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("interrupted")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), Fragile(), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (1,))
    for part in made:
        fully_shard(part, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def gradients(made: nn.Sequential) -> list[torch.Tensor]:
    made(torch.ones(2, 4)).sum().backward()
    return [parameter.grad.to_local().clone() for parameter in made.parameters()]


@pytest.mark.parametrize("where", ["before", "forward", "between", "backward"])
def test_an_interrupted_iteration_leaves_no_trace(world, where):
    expected = gradients(model())
    made = model()
    if where == "forward":
        made[1].fails = True
        with pytest.raises(RuntimeError, match="interrupted"):
            made(torch.ones(2, 4))
        made[1].fails = False
    elif where == "between":
        made(torch.ones(2, 4))
    elif where == "backward":
        with pytest.raises(RuntimeError, match="interrupted"):
            FragileBackward.apply(made(torch.ones(2, 4))).sum().backward()
    (root,) = fsdp.roots(made)
    fsdp.abandon(root)
    for parameter in made.parameters():
        parameter.grad = None
    assert all(map(torch.equal, gradients(made), expected))


def test_a_part_knows_its_root(world):
    """What is protected may be less than what is sharded together."""
    made = model()
    made(torch.ones(2, 4))
    fsdp.abandon(fsdp.roots(made[0])[0])
    assert len(gradients(made)) == 6
