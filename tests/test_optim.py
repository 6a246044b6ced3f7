"""LAMB and Lion against their definitions, in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from regrow.optim import LAMB, Lion


def grads(count: int, size: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=rng, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("maximize", [False, True])
def test_lamb_follows_its_definition(maximize: bool) -> None:
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    optimizer = LAMB([p], lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, maximize=maximize)
    w, m, v = start.clone(), torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
    for t, grad in enumerate(grads(5, 7), start=1):
        p.grad = grad.clone()
        optimizer.step()
        g = -grad if maximize else grad
        m = 0.8 * m + 0.2 * g
        v = 0.9 * v + 0.1 * g * g
        u = (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6) + 0.1 * w
        ratio = min(float(w.norm() / u.norm()), 10.0)
        w = w - 0.01 * ratio * u
        torch.testing.assert_close(p.detach(), w, rtol=1e-6, atol=1e-9)
        assert float(optimizer.state[p]["trust_ratio"]) == pytest.approx(ratio, rel=1e-6)


def test_lamb_trusts_a_zero_parameter_and_caps_the_ratio() -> None:
    zero, large = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.full((3,), 1e6))
    optimizer = LAMB([zero, large], lr=0.1, max_trust=2.0)
    zero.grad, large.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert float(optimizer.state[zero]["trust_ratio"]) == 1.0
    assert float(optimizer.state[large]["trust_ratio"]) == 2.0


@pytest.mark.parametrize("maximize", [False, True])
def test_lion_follows_its_definition(maximize: bool) -> None:
    start = torch.linspace(-1, 1, 7, dtype=torch.float64)
    p = nn.Parameter(start.clone())
    optimizer = Lion([p], lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, maximize=maximize)
    w, m = start.clone(), torch.zeros(7, dtype=torch.float64)
    for grad in grads(5, 7):
        p.grad = grad.clone()
        optimizer.step()
        g = -grad if maximize else grad
        w = w * (1 - 0.01 * 0.1) - 0.01 * (0.8 * m + 0.2 * g).sign()
        m = 0.9 * m + 0.1 * g
        torch.testing.assert_close(p.detach(), w)


@pytest.mark.parametrize("cls", [LAMB, Lion])
def test_they_train_save_and_load(cls: type[LAMB] | type[Lion]) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    net = nn.Linear(4, 1)
    optimizer = cls(net.parameters(), lr=0.05)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    other = cls(net.parameters(), lr=0.05)
    other.load_state_dict(optimizer.state_dict())
    for p in net.parameters():
        for name, value in optimizer.state[p].items():
            assert torch.equal(other.state[p][name], value)


@pytest.mark.parametrize("cls", [LAMB, Lion])
def test_they_call_the_closure_and_leave_parameters_without_gradient(cls: type[LAMB] | type[Lion]) -> None:
    p, idle = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = cls([p, idle])

    def closure() -> float:
        loss = p.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 3.0
    assert torch.equal(idle, torch.ones(3)) and idle not in optimizer.state
    assert not torch.equal(p, torch.ones(3))


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"weight_decay": -0.1}])
def test_options_out_of_range_are_named(bad: dict[str, float]) -> None:
    for cls in (LAMB, Lion):
        with pytest.raises(ValueError, match="out of range"):
            cls([nn.Parameter(torch.ones(1))], **bad)
    with pytest.raises(ValueError, match="max_trust"):
        LAMB([nn.Parameter(torch.ones(1))], max_trust=float("inf"))


def test_sparse_and_complex_are_refused() -> None:
    for cls in (LAMB, Lion):
        p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        p.grad = torch.ones(3, dtype=torch.complex64)
        with pytest.raises(ValueError, match=cls.__name__):
            cls([p]).step()
