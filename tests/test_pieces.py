"""A step of some parameters in pieces has the very bits of the optimizer's own step."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, optim

from regrow import pieces
from regrow.optim import LAMB, Lion
from regrow.undo import rule_for

SHAPES = ((129, 65), (3 * 1024 + 17,), (40, 40), (5,), ())

CASES = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"foreach": True}),
    (optim.Adam, {"fused": True}),
    (optim.Adam, {"lr": torch.tensor(0.01)}),
    (optim.AdamW, {"maximize": True}),
    (optim.Adadelta, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.Adafactor, {}),
    (Lion, {}),
    (LAMB, {}),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 1024)


def tensors_of(optimizer: optim.Optimizer) -> list[Tensor]:
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found.append(param.detach())
            found += [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return found


@pytest.mark.parametrize(("cls", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_the_bits_are_the_same(cls, options):
    torch.manual_seed(0)
    params = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    whole = cls([{"params": params[:2]}, {"params": params[2:], "lr": 0.02}], **options)
    cut = deepcopy(whole)
    for _ in range(4):
        grads = [torch.randn_like(param) for param in params]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        whole.step()
        twins = [param for group in cut.param_groups for param in group["params"]]
        for some in (slice(3, 5), slice(0, 3)):
            pieces.step(cut, twins[some], grads[some], elementwise=rule_for(cut).steps_elementwise)
        assert all(twin.grad is None for twin in twins)
        pairs = zip(tensors_of(whole), tensors_of(cut), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_large_parameters_are_cut_and_their_state_stays_in_place():
    param = torch.randn(4 * 1024, requires_grad=True)
    optimizer = optim.Adam([param])
    grad = torch.randn_like(param)
    pieces.step(optimizer, [param], [grad], elementwise=True)  # makes the state
    before = dict(optimizer.state[param])
    seen = []
    original = optim.Adam.step

    def step(self):
        seen.append([piece.numel() for group in self.param_groups for piece in group["params"]])
        return original(self)

    optim.Adam.step = step
    try:
        pieces.step(optimizer, [param], [grad], elementwise=True)
        pieces.step(optimizer, [param], [grad], elementwise=False)
    finally:
        optim.Adam.step = original
    assert seen == [[1024] * 4, [4096]]
    assert all(optimizer.state[param][name] is value for name, value in before.items())
    assert optimizer.state[param]["step"].item() == 3


def test_the_optimizer_itself_is_left_alone():
    param = torch.randn(3000, requires_grad=True)
    optimizer = optim.SGD([param], lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    count = scheduler.last_epoch
    pieces.step(optimizer, [param], [torch.ones_like(param)], elementwise=True)
    assert calls == []
    assert getattr(optimizer, "_opt_called", False) is False
    assert scheduler.last_epoch == count
    assert list(optimizer.state) == [param]
