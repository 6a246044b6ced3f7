"""What a ledger notes, holds, refuses and lets go of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from regrow.errors import UndoUnsupported
from regrow.optim import LAMB, Lion
from regrow.undo import Ledger
from regrow.undo.registry import _RULES, rule_for
from regrow.undo.rule import Elementwise, Note
from test_undo_families import assert_same, set_grads, snapshot


def trained(cls: type[Optimizer] = AdamW, steps: int = 3, **options: object) -> tuple[list[Tensor], Optimizer]:
    torch.manual_seed(0)
    params: list[Tensor] = [nn.Parameter(torch.randn(50, 8)), nn.Parameter(torch.randn(11))]
    optimizer = cls(params, **options)
    for step in range(steps):
        set_grads(params, step)
        optimizer.step()
    set_grads(params, steps)
    return params, optimizer


def restricted(optimizer: Optimizer, params: list[Tensor]) -> Optimizer:
    """A shallow copy that steps some parameters only, over the same state."""
    part = copy.copy(optimizer)
    part.param_groups = [
        {**group, "params": [p for p in group["params"] if any(p is q for q in params)]}
        for group in optimizer.param_groups
    ]
    return part


@pytest.mark.parametrize("exact", [True, False])
def test_parts_of_a_step_compose(exact: bool) -> None:
    params, optimizer = trained()
    before = [snapshot(p, optimizer) for p in params]
    ledger = Ledger(optimizer, exact=exact)
    for param in params:
        ledger.before([param])
        restricted(optimizer, [param]).step()
        ledger.after([param])
    after = [snapshot(p, optimizer) for p in params]
    ledger.undo([params[1]])
    assert_same([params[0]], optimizer, after[:1])
    if exact:
        assert_same([params[1]], optimizer, before[1:])
    torch.testing.assert_close(params[1].detach(), before[1][0])
    assert ledger.can_undo(params[0])


def test_a_gradient_set_to_none_is_still_held() -> None:
    params, optimizer = trained()
    before = [snapshot(p, optimizer) for p in params]
    ledger = Ledger(optimizer)
    ledger.before()
    optimizer.step()
    ledger.after()
    optimizer.zero_grad(set_to_none=True)
    ledger.undo(params)
    assert_same(params, optimizer, before)


def test_a_gradient_overwritten_in_place_is_noticed_and_nothing_is_changed() -> None:
    params, optimizer = trained()
    ledger = Ledger(optimizer)
    ledger.before()
    optimizer.step()
    ledger.after()
    after = [snapshot(p, optimizer) for p in params]
    assert params[1].grad is not None
    params[1].grad.zero_()
    assert ledger.can_undo(params[0])
    assert "gradient was overwritten" in str(ledger.why_not(params[1]))
    with pytest.raises(UndoUnsupported, match="set_to_none=True"):
        ledger.undo(params)
    assert_same(params, optimizer, after)


def test_what_changed_since_the_update_is_noticed() -> None:
    params, optimizer = trained()
    ledger = Ledger(optimizer)
    ledger.before()
    optimizer.step()
    ledger.after()
    with torch.no_grad():
        params[0].clamp_(-1, 1)
    optimizer.state[params[1]]["exp_avg"].zero_()
    assert ledger.why_not(params[0]) == "its param was changed since its update"
    assert ledger.why_not(params[1]) == "its exp_avg was changed since its update"


def test_reasons() -> None:
    params, optimizer = trained()
    params[1].grad = None
    ledger = Ledger(optimizer, exact=False)
    assert ledger.why_not(params[0]) == "it was not updated in this step"
    ledger.before()
    assert "begun and not completed" in str(ledger.why_not(params[0]))
    optimizer.step()
    ledger.after()
    assert ledger.why_not(params[0]) is None
    assert ledger.why_not(params[1]) == "it was not updated in this step"
    ledger.undo([params[0]])
    assert ledger.why_not(params[0]) == "its update was taken back already"
    for _ in range(2):
        ledger.before()
        optimizer.step()
        ledger.after()
    assert ledger.why_not(params[0]) == "it was updated more than once in this step"
    ledger.clear()
    assert ledger.why_not(params[0]) == "it was not updated in this step"
    with pytest.raises(ValueError, match="in no group"):
        other = nn.Parameter(torch.zeros(2))
        other.grad = torch.zeros(2)
        ledger.before([other])


@pytest.mark.parametrize("stepped", [True, False])
def test_an_update_cut_short_is_taken_back_exactly(stepped: bool) -> None:
    params, optimizer = trained(Adam, amsgrad=True)
    before = [snapshot(p, optimizer) for p in params]
    ledger = Ledger(optimizer)
    ledger.before()
    if stepped:
        restricted(optimizer, params[:1]).step()
    ledger.undo(params)
    assert_same(params, optimizer, before)


def test_a_step_can_be_taken_back_and_made_again_and_taken_back() -> None:
    params, optimizer = trained()
    before = [snapshot(p, optimizer) for p in params]
    ledger = Ledger(optimizer)
    for _ in range(3):
        ledger.before()
        optimizer.step()
        ledger.after()
        ledger.undo(params)
        assert_same(params, optimizer, before)


@pytest.mark.parametrize("exact", [True, False])
def test_an_update_noted_twice_or_made_twice(exact: bool) -> None:
    params, optimizer = trained()
    ledger = Ledger(optimizer, exact=exact)
    ledger.before()
    ledger.before()
    old = [snapshot(p, optimizer) for p in params]
    optimizer.step()
    ledger.after()
    assert all(ledger.can_undo(param) for param in params)
    ledger.undo(params)
    if exact:
        assert_same(params, optimizer, old)
    assert [float(optimizer.state[param]["step"]) for param in params] == [3.0, 3.0]
    for _ in range(2):
        ledger.before()
        optimizer.step()
        ledger.after()
    assert ledger.why_not(params[0]) == "it was updated more than once in this step"


class _OptionsOnly:
    """A note of which only the options may be looked at."""

    def __init__(self, hyper: dict[str, Any]) -> None:
        self.hyper = hyper

    number = Note.number


def test_a_rule_that_says_so_keeps_by_options_alone() -> None:
    """One answer is then taken for all parameters of a group."""
    saying = [cls for cls, rule in _RULES.items() if isinstance(rule, Elementwise) and rule.keeps_by_options]
    assert {Adam, AdamW, SGD, LAMB, Lion} <= set(saying)
    for cls in saying:
        optimizer = cls([nn.Parameter(torch.zeros(2))], lr=0.1)
        for decay in (0.0, 0.1):
            hyper = {**optimizer.param_groups[0], "weight_decay": decay}
            rule_for(optimizer).keep(_OptionsOnly(hyper))  # type: ignore[arg-type]


def test_state_that_was_none_is_none_again() -> None:
    params, optimizer = trained(SGD, steps=0, lr=0.1, momentum=0.9)
    optimizer.state[params[0]]["momentum_buffer"] = None
    before = [snapshot(p, optimizer) for p in params]
    ledger = Ledger(optimizer)
    ledger.before()
    optimizer.step()
    ledger.after()
    ledger.undo(params)
    assert_same(params, optimizer, before)
    assert optimizer.state[params[0]] == {"momentum_buffer": None}
    assert params[1] not in optimizer.state


def test_memory_held() -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(100_000))
    optimizer = AdamW([param])
    ledger = Ledger(optimizer)
    for _ in range(12):
        param.grad = torch.randn(100_000)
        ledger.clear()
        ledger.before()
        optimizer.step()
        ledger.after()
    assert 3.0 <= ledger.nbytes() / 100_000 < 3.1  # a byte for each of p, m, v, and a short list
    ledger.clear()
    assert ledger.nbytes() == 0
    ledger.exact = False
    ledger.before()
    optimizer.step()
    ledger.after()
    assert ledger.nbytes() == 0
    ledger.undo([param])


def test_only_what_cannot_be_inverted_is_kept() -> None:
    params, optimizer = trained(Adam, amsgrad=True)
    ledger = Ledger(optimizer, exact=False)
    ledger.before()
    optimizer.step()
    ledger.after()
    assert ledger.nbytes() == 4 * sum(p.numel() for p in params)


@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_memory_layouts(cls: type[Optimizer]) -> None:
    torch.manual_seed(0)
    options = {"lr": 0.1, "momentum": 0.9} if cls is SGD else {}
    last = nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last))
    mismatched = nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last))
    gaps = nn.Parameter(torch.randn(10, 10)[::2, ::3])
    turned = nn.Parameter(torch.randn(7, 9).t())
    params: list[Tensor] = [last, mismatched, gaps, turned]
    optimizer = cls(params, **options)
    ledger = Ledger(optimizer)
    for _ in range(4):
        for param in params:
            param.grad = torch.randn_like(param)
        mismatched.grad = torch.randn(4, 3, 5, 6)
        gaps.grad = torch.randn(gaps.shape)
        before = [snapshot(p, optimizer) for p in params]
        ledger.before()
        optimizer.step()
        ledger.after()
        ledger.undo(params)
        assert_same(params, optimizer, before)
        ledger.clear()
        optimizer.step()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "cls, options", [(SparseAdam, {}), (Adagrad, {}), (SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9})]
)
def test_sparse_gradients(cls: type[Optimizer], options: dict[str, float], exact: bool) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(40, 5, sparse=True)
    optimizer = cls(table.parameters(), **options)
    ledger = Ledger(optimizer, exact=exact)
    for step in range(4):
        optimizer.zero_grad()
        (table(torch.tensor([1, 7, 7, step])) * torch.randn(4, 5)).sum().backward()
        before = table.weight.detach().clone()
        state = snapshot_dense(optimizer, table.weight)
        ledger.before()
        optimizer.step()
        ledger.after()
        assert not torch.equal(table.weight, before)
        if momentum_is_dense(optimizer):
            assert ledger.nbytes() < table.weight.nbytes * 2
        ledger.undo([table.weight])
        assert torch.equal(table.weight, before)
        assert snapshot_dense(optimizer, table.weight) == state
        ledger.clear()
        optimizer.step()


def momentum_is_dense(optimizer: Optimizer) -> bool:
    return "momentum" not in optimizer.defaults or not optimizer.defaults["momentum"]


def snapshot_dense(optimizer: Optimizer, param: Tensor) -> dict[str, object] | None:
    if param not in optimizer.state:
        return None
    return {k: v.to_dense().tolist() if isinstance(v, Tensor) else v for k, v in optimizer.state[param].items()}


def test_the_number_of_threads_may_change() -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(300_001))
    optimizer = AdamW([param])
    ledger = Ledger(optimizer)
    try:
        for _ in range(2):
            param.grad = torch.randn(300_001)
            before = [snapshot(param, optimizer)]
            torch.set_num_threads(2)
            ledger.before()
            optimizer.step()
            ledger.after()
            torch.set_num_threads(1)
            ledger.undo([param])
            assert torch.get_num_threads() == 1
            assert_same([param], optimizer, before)
            optimizer.step()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("overflow", [0.0, 1.0])
@pytest.mark.parametrize("cls", [SGD, AdamW, Adagrad])
def test_a_fused_step_under_a_grad_scaler(cls: type[Optimizer], overflow: float, exact: bool) -> None:
    options = {"momentum": 0.9} if cls is SGD else {}
    params, optimizer = trained(cls, fused=True, lr=0.1, **options)
    before = [snapshot(p, optimizer) for p in params]
    ledger = Ledger(optimizer, exact=exact)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(overflow)
    ledger.before()
    optimizer.step()
    ledger.after()
    ledger.undo(params)
    if exact or overflow:
        assert_same(params, optimizer, before)
    for param, (old, _) in zip(params, before, strict=True):
        torch.testing.assert_close(param.detach(), old)


def test_sharded_parameters() -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
        fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = AdamW(net.parameters())
        ledger = Ledger(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(4, 6)).square().sum().backward()
            params = list(net.parameters())
            before = [local_state(p, optimizer) for p in params]
            ledger.before()
            optimizer.step()
            ledger.after()
            assert local_state(params[0], optimizer) != before[0]
            ledger.undo(params)
            assert [local_state(p, optimizer) for p in params] == before
            ledger.clear()
            optimizer.step()
    finally:
        dist.destroy_process_group()


def local_state(param: Tensor, optimizer: Optimizer) -> list[object]:
    state = optimizer.state.get(param, {})
    tensors = [param.detach(), *state.values()]
    return [list(state), *((t.to_local() if hasattr(t, "to_local") else t).tolist() for t in tensors)]
