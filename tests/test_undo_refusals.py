"""What cannot be taken back is refused by name before any failure; anything can be taught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from regrow.errors import UndoUnsupported
from regrow.optim import LAMB, Lion
from regrow.undo import PARAM, Elementwise, Ledger, Note, Slice, check_supported, register
from test_undo_families import CASES, make


def param(dtype: torch.dtype = torch.float32) -> Tensor:
    return nn.Parameter(torch.ones(40, dtype=dtype))


def test_every_optimizer_of_torch_is_supported_or_refused_by_name() -> None:
    classes = {getattr(optim, name) for name in optim.__all__}
    covered = {case.cls for case in CASES} | {optim.SparseAdam}
    unsupported = (
        {c for c in classes if isinstance(c, type) and issubclass(c, optim.Optimizer)} - covered - {optim.Optimizer}
    )
    assert unsupported == {optim.LBFGS}
    assert {LAMB, Lion} <= covered
    with pytest.raises(UndoUnsupported, match="LBFGS"):
        check_supported(optim.LBFGS([param()]))
    for case in CASES:
        check_supported(make(case, torch.float32)[1])


def test_differentiable_is_refused() -> None:
    with pytest.raises(UndoUnsupported, match=r"Adam\(differentiable=True\).*differentiable=False"):
        Ledger(optim.Adam([param()], differentiable=True))


def test_fused_half_precision_sgd_is_refused() -> None:
    check_supported(optim.SGD([param()], fused=True))
    with pytest.raises(UndoUnsupported, match=r"SGD: fused=True does not update torch.bfloat16.*Use fused=False"):
        check_supported(optim.SGD([param(torch.bfloat16)], fused=True))


def test_unknown_type_is_refused() -> None:
    with pytest.raises(UndoUnsupported, match="float8_e4m3fn"):
        check_supported(optim.SGD([nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)]))


class Halving(optim.SGD):
    """Overrides `step`, so nothing is known about it."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)


class Renamed(optim.SGD):
    """Leaves `step` as it is."""


class Mine(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class MineRule(Elementwise):
    def tensors(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return ()

    def keep(self, note: Note) -> tuple[str, ...]:
        return ()

    def prepare(self, note: Note) -> float:
        return note.number("lr")

    def invert(self, k: float, s: Slice) -> None:
        torch.add(s.new[PARAM], torch.sign(s.grad, out=s.spare[0]), alpha=k, out=s.old[PARAM])


def test_a_subclass_that_keeps_step_is_supported_and_one_that_changes_it_is_not() -> None:
    check_supported(Renamed([param()], lr=0.1))
    with pytest.raises(UndoUnsupported, match=r"Halving changes the step of SGD.*regrow\.undo\.register"):
        check_supported(Halving([param()], lr=0.1))


def test_an_optimizer_of_ones_own() -> None:
    p = param()
    mine = Mine([p])
    with pytest.raises(UndoUnsupported, match=r"Mine.*regrow\.undo\.register"):
        check_supported(mine)
    register(Mine, MineRule())
    ledger = Ledger(mine)
    p.grad = torch.randn(40)
    ledger.before()
    mine.step()
    ledger.after()
    assert not torch.equal(p, torch.ones(40))
    ledger.undo([p])
    assert torch.equal(p, torch.ones(40))


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.RMSprop, optim.Adagrad, optim.Rprop])
def test_complex_parameters(cls: type[optim.Optimizer]) -> None:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(30, dtype=torch.complex64))
    optimizer = cls([p], lr=0.1)
    ledger = Ledger(optimizer)
    for _ in range(3):
        p.grad = torch.randn(30, dtype=torch.complex64)
        before = p.detach().clone()
        ledger.before()
        optimizer.step()
        ledger.after()
        ledger.undo([p])
        assert torch.equal(p, before)
        ledger.clear()
        optimizer.step()
