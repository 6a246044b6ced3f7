"""Ranks that are new begin with another's state and draw numbers of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from data_help import generators
from regrow.state.resized import donor, fork
from regrow.state.rng import RandomNumbers, put_back


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    seen = RandomNumbers()
    seen.look()
    kept = seen.state()
    yield
    put_back(kept)


def seed(number: int) -> None:
    torch.manual_seed(number), random.seed(number), np.random.seed(number)


def draw() -> tuple[Any, ...]:
    return torch.rand(4).tolist(), [random.random() for _ in range(4)], np.random.rand(4).tolist()


def drawn(rank: int, old_world: int, step: int = 7, inherited: int = 0) -> tuple[Any, ...]:
    seed(inherited)
    fork(rank, old_world, step)
    return draw()


def test_donors() -> None:
    assert [donor(rank, 3) for rank in range(8)] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [donor(rank, 4) for rank in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="old_world=0"):
        donor(0, 0)
    with pytest.raises(ValueError, match="rank=-1"):
        donor(-1, 2)


def test_a_rank_that_existed_keeps_its_numbers() -> None:
    seed(5)
    before = generators()
    fork(3, 4, 100)
    assert generators() == before


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_no_two_ranks_draw_the_same(seeds: tuple[int, int]) -> None:
    """Whether the old ranks stood alike or not; those that stood alike do so still."""
    draws = [drawn(rank, 2, inherited=seeds[donor(rank, 2)]) for rank in range(40)]
    for kind in zip(*draws, strict=True):
        assert len({tuple(numbers) for numbers in kind}) == 38 + len(set(seeds))


def test_a_fork_is_the_same_again_and_depends_on_everything() -> None:
    first = drawn(4, 2)
    assert drawn(4, 2) == first
    for other in (drawn(4, 2, step=8), drawn(6, 2), drawn(4, 2, inherited=1)):
        assert all(a != b for a, b in zip(first, other, strict=True))


def test_what_the_donor_has_drawn_counts_too() -> None:
    first = drawn(4, 2)
    seed(0)
    torch.rand(1)
    fork(4, 2, 7)
    assert draw() != first


def test_normal_numbers_kept_aside_are_forgotten() -> None:
    def normals() -> list[float]:
        fork(4, 2, 7)
        return [torch.randn(()).item(), random.gauss(0, 1), float(np.random.randn())]

    seed(0)
    first = normals()
    seed(0)
    random.gauss(0, 1), np.random.randn()  # each leaves the second of a pair
    assert normals() == first


def test_another_kind_of_numpy_generator_stays_what_it_is() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        fork(2, 2, 7)
        first = np.random.rand()
        fork(3, 2, 7)
        assert np.random.rand() != first
        assert type(np.random.get_bit_generator()) is np.random.PCG64
    finally:
        np.random.set_bit_generator(before)
