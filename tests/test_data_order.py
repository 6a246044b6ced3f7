"""The order of samples and how ranks share an epoch: each sample once, whatever the sizes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    TensorDataset,
)

from data_help import share
from regrow.data.shuffle import Permutation, mix


@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(size, seed, epoch).at(np.arange(size)).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 10, 16, 37])
def test_every_element_is_equally_likely_at_every_place(size: int) -> None:
    epochs = 3000
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), Permutation(size, 7, epoch).at(np.arange(size))] += 1
    expected = epochs / size
    chi2, freedom = float(((counts - expected) ** 2 / expected).sum()), (size - 1) ** 2
    assert abs(chi2 - freedom) < 6 * (2 * freedom) ** 0.5 + 6


def test_all_orders_of_a_few_elements_come_up() -> None:
    seen = Counter(tuple(Permutation(4, seed, 0).at(np.arange(4)).tolist()) for seed in range(4800))
    assert len(seen) == 24
    assert max(seen.values()) < 3 * min(seen.values())


@pytest.mark.parametrize("size", [1000, 65_536, 1_000_003])
def test_a_long_order_looks_random(size: int) -> None:
    places = np.arange(size)
    order, next_order = Permutation(size, 0, 0).at(places), Permutation(size, 0, 1).at(places)
    noise = 5 / size**0.5
    for other in (places, np.roll(order, 1), np.roll(order, 2), next_order):
        assert abs(float(np.corrcoef(order, other)[0, 1])) < noise
    for bit in range(4):  # neighbours share no low bits either
        assert abs(float((((order ^ np.roll(order, 1)) >> bit) & 1).mean()) - 0.5) < noise
    assert int((order == places).sum()) < 10
    assert int((np.diff(order) == 1).sum()) < 10


def test_a_place_is_found_without_the_others() -> None:
    size = 10**15  # could not be drawn whole
    order = Permutation(size, 3, 4)
    places = np.array([0, 1, size // 2, size - 1])
    together = order.at(places)
    assert [int(order.at(places[i : i + 1])[0]) for i in range(4)] == together.tolist()
    assert len(set(together.tolist())) == 4
    assert together.min() >= 0
    assert together.max() < size


def test_mix_tells_order_and_sign_apart() -> None:
    keys = [(0,), (1,), (-1,), (1, 0), (0, 1), (0, 0), (2**63,), (-(2**62),)]
    assert len({mix(*key) for key in keys}) == len(keys)


@given(
    samples=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=300, deadline=None)
def test_each_sample_once_over_all_ranks(samples: int, batch_size: int, world: int, shuffle: bool, epoch: int) -> None:
    if samples < world:
        with pytest.raises(ValueError, match="each rank needs at least one"):
            share(samples=samples, batch_size=batch_size, world_size=world)
        return
    ranks = [
        share(samples=samples, batch_size=batch_size, world_size=world, rank=rank, shuffle=shuffle)
        for rank in range(world)
    ]
    batches = ranks[0].batches
    read = [[rank.indices(epoch, batch) for rank in ranks] for batch in range(batches)]
    assert sorted(i for row in read for part in row for i in part) == list(range(samples))
    for number, row in enumerate(read):
        sizes = [len(part) for part in row]
        if number < batches - 1:
            assert sizes == [batch_size] * world
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch_size + 1


def test_fewer_samples_than_ranks_are_joined_to_the_batch_before() -> None:
    ranks = [share(samples=14, batch_size=2, world_size=4, rank=rank, shuffle=False) for rank in range(4)]
    assert [rank.batches for rank in ranks] == [2] * 4
    ranks = [share(samples=19, batch_size=2, world_size=4, rank=rank, shuffle=False) for rank in range(4)]
    assert [rank.batches for rank in ranks] == [2] * 4
    assert [len(rank.indices(0, 1)) for rank in ranks] == [3, 3, 3, 2]


def test_drop_last_drops_the_partial_batch() -> None:
    assert share(samples=19, batch_size=4, drop_last=True).batches == 4
    assert len(share(samples=19, batch_size=4, drop_last=True).indices(0, 3)) == 4
    with pytest.raises(ValueError, match="drop_last leaves nothing"):
        share(samples=19, batch_size=4, world_size=5, drop_last=True)


def test_unshuffled_order_is_the_distributed_samplers() -> None:
    dataset = TensorDataset(torch.arange(24))
    for rank in range(3):
        sampler = DistributedSampler(dataset, 3, rank, shuffle=False)
        mine = share(samples=24, batch_size=4, world_size=3, rank=rank, shuffle=False)
        assert [i for batch in range(mine.batches) for i in mine.indices(0, batch)] == list(sampler)
