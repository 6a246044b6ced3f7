"""Random numbers: every draw from any generator is noticed, nothing else is, and all can be put back."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from regrow.state import codec, rng
from regrow.state.rng import RandomNumbers, put_back

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(1).item(),
    "torch normal": lambda: torch.randn(1).item(),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy integer": lambda: np.random.randint(1 << 30),
}


@pytest.fixture(params=list(DRAWS))
def draw(request: pytest.FixtureRequest) -> Callable[[], object]:
    """One way to draw a number."""
    return DRAWS[request.param]


def test_every_draw_is_noticed_and_nothing_else(draw: Callable[[], object]) -> None:
    seen = RandomNumbers()
    assert seen.look()
    for _ in range(1300):  # twice around the generators' 624 words; of normal numbers every other is kept aside
        assert not seen.look()
        draw()
        assert seen.look()


def test_what_was_seen_is_put_back(draw: Callable[[], object]) -> None:
    seen = RandomNumbers()
    for _ in range(3):
        draw()
        seen.look()
        kept = codec.encode(seen.state())
        first = [draw() for _ in range(700)]
        put_back(codec.decode(kept))
        assert [draw() for _ in range(700)] == first


def test_a_seed_is_noticed() -> None:
    seen = RandomNumbers()
    seen.look()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(12345)
        assert seen.look()
        seed(12345)
        assert not seen.look()


def test_another_generator_of_numpy() -> None:
    usual = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(7))
        seen = RandomNumbers()
        assert seen.look()
        for _ in range(4):
            assert not seen.look()
            np.random.randn()
            assert seen.look()
    finally:
        np.random.set_bit_generator(usual)


def test_the_memory_of_the_generators_is_where_it_is_looked_for() -> None:
    """Without it everything is still right, but each look takes ten times as long."""
    address = rng._address_of_python()
    assert address is not None
    assert rng._raw_of_numpy(np)
    before = ctypes.string_at(address, rng._PYTHON.size)
    random.random()
    assert ctypes.string_at(address, rng._PYTHON.size) != before


def test_another_layout_of_python_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_address_of_python", lambda: None)
    seen = RandomNumbers()
    assert seen.look()
    for name in ("python", "python gauss"):
        for _ in range(4):
            assert not seen.look()
            DRAWS[name]()
            assert seen.look()
