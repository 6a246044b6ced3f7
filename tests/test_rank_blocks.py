"""A rank's state in blocks: what is cut, what travels with what, and how a replacement puts it together again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regrow.iterative import RunningCheckpoint, read
from regrow.iterative.storage import glance
from regrow.run.rank_blocks import RankBlocks
from regrow.state.registry import Registry


def rank(kind=torch.optim.AdamW, width: int = 64) -> tuple[Registry, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 2))
    optimizer = kind(model.parameters(), lr=1e-2)
    registry = Registry()
    registry.add({"model": model, "optimizer": optimizer})
    return registry, model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, model[0].in_features, generator=generator)).square().mean().backward()
    optimizer.step()


def tensors(registry: Registry) -> list[torch.Tensor]:
    found = []
    for param in registry.params:
        found.append(param.tensor.detach())
        found += param.optimizer.state.get(param.tensor, {}).values()
    return found


def test_large_parameters_are_cut_and_small_ones_are_not():
    blocks = RankBlocks(rank()[0], list)
    names = blocks.names()
    assert "model.2.weight" in names and "model.0.bias" in names
    cut = [name for name in names if name.startswith("model.0.weight[")]
    assert len(cut) > 8 and cut[0] == "model.0.weight[0:16]" and cut[-1].endswith(":256]")
    assert sum(len(blocks.get(name)[0]) for name in cut) == 256


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.SGD, torch.optim.Rprop])
def test_a_replacement_gets_the_very_bits(tmp_path, kind):
    registry, model, optimizer = rank(kind)
    for seed in range(3):
        train(model, optimizer, seed)
    with RunningCheckpoint(RankBlocks(registry, list), every=4, directory=tmp_path, iteration=3):
        pass
    other, twin, theirs = rank(kind)
    assert RankBlocks(other, list).install(read(tmp_path).records) == []
    assert all(torch.equal(a, b) for a, b in zip(tensors(registry), tensors(other), strict=True))
    for seed in (3, 4):
        train(model, optimizer, seed)
        train(twin, theirs, seed)
    assert all(torch.equal(a, b) for a, b in zip(tensors(registry), tensors(other), strict=True))


def test_blocks_of_different_ages(tmp_path):
    """All are saved before the first step, when there are no moments; some again later: those bring theirs."""
    registry, model, optimizer = rank()
    blocks = RankBlocks(registry, list)
    first = model[0].weight.detach().clone()
    with RunningCheckpoint(blocks, every=16, fraction=1 / 8, directory=tmp_path) as checkpoint:
        for step in (1, 2):
            train(model, optimizer, step)
            blocks.renew()
            saved = checkpoint.step(step)
    assert 0 < len(saved) < len(blocks.names()) / 2
    assert {name: found.iteration for name, found in glance(tmp_path).items()} == {
        name: 2 if name in saved else 0 for name in blocks.names()
    }
    other, _, theirs = rank()
    RankBlocks(other, list).install(read(tmp_path).records)
    weight = other.params[0].tensor
    state = theirs.state[weight]
    rows = [name for name in blocks.names() if name.startswith("model.0.weight[")]
    assert {*rows} & {*saved} and {*rows} - {*saved}
    for name in rows:
        start, stop = (int(part) for part in name[len("model.0.weight[") : -1].split(":"))
        here = slice(start, stop)
        if name in saved:
            assert torch.equal(weight[here], model[0].weight[here])
            assert torch.equal(state["exp_avg"][here], optimizer.state[model[0].weight]["exp_avg"][here])
        else:
            assert torch.equal(weight[here], first[here]) and not state["exp_avg"][here].any()
    assert state["step"] == 2  # it is not cut into rows: the newest block's


def test_large_tensors_that_ranks_share_are_blocks_too(tmp_path):
    registry, *_ = rank()
    average = [torch.arange(5.0), torch.ones(3, 3)]
    with RunningCheckpoint(RankBlocks(registry, lambda: average), every=4, directory=tmp_path):
        pass
    found = RankBlocks(rank()[0], list).install(read(tmp_path).records)
    assert all(torch.equal(a, b) for a, b in zip(found, average, strict=True))
