"""A stock DataLoader is taken over, or refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from data_help import Endless, Noisy, Where
from regrow.data import resumable


def test_a_dataloader_is_taken_over() -> None:
    def together(samples: list[torch.Tensor]) -> list[int]:
        return [int(sample[0]) for sample in samples]

    loader = resumable(DataLoader(Noisy(), 6, shuffle=True, collate_fn=together, drop_last=True), seed=9)
    loader.bind(0, 1)
    assert len(loader) == 3
    assert loader.seed == 9
    order = [i for batch in loader for i in batch]
    assert len(set(order)) == 18
    assert order != sorted(order)
    assert resumable(loader) is loader
    with pytest.raises(ValueError, match="seed=9"):
        resumable(loader, seed=1)
    plain = resumable(DataLoader(Noisy(), 6, collate_fn=together))
    plain.bind(0, 1)
    assert [i for batch in plain for i in batch] == list(range(20))


def test_a_dataloader_with_workers_is_taken_over() -> None:
    dataset = Where(21)
    sampler = DistributedSampler(dataset, 2, 1, shuffle=True, seed=4)
    loader = resumable(DataLoader(dataset, 5, sampler=sampler, num_workers=2, persistent_workers=True))
    try:
        batches = list(loader)
        assert loader.seed == 4
        assert [len(batch) for batch in batches] == [5, 5]
        assert {int(pid) for batch in batches for pid in batch[:, 1]} == set(loader.worker_pids)
    finally:
        loader.close()
    assert not resumable(DataLoader(dataset, sampler=DistributedSampler(dataset, 2, 1, shuffle=False)))._sharing[
        "shuffle"
    ]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda data: DataLoader(Endless(), 2), "map-style"),
        (lambda data: DataLoader(data, batch_size=None), "batch_size=None"),
        (lambda data: DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False)), "batch_sampler"),
        (lambda data: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 20, 20)), "WeightedRandomSampler cannot"),
        (lambda data: DataLoader(data, sampler=RandomSampler(data, replacement=True)), "with replacement"),
        (lambda data: DataLoader(data, sampler=RandomSampler(data, num_samples=5)), "num_samples"),
        (lambda data: DataLoader(data, sampler=DistributedSampler(Noisy(8), 1, 0)), "another dataset"),
        (lambda data: data, "a torch DataLoader or"),
    ],
)
def test_what_cannot_be_taken_over_says_what_to_do(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resumable(make(Noisy()))
