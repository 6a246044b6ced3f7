"""The resumable loader: any position is reached again, from any process, with the same randomness."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    Subset,
    TensorDataset,
)

from data_help import Bad, Endless, Noisy, Where, generators, gone, same, take
from regrow.data import Loader


@pytest.mark.parametrize("workers", [0, 2])
def test_any_position_is_reached_again(workers: int) -> None:
    whole = take(Loader(Noisy(), 3, rank=0, world_size=1), 21)  # three epochs of seven
    loader = Loader(Noisy(), 3, rank=0, world_size=1, num_workers=workers)
    try:
        states = []
        for _ in range(16):
            states.append(loader.state_dict())
            loader.next_batch()
        assert loader.epoch == 2
        for position in (0, 13, 7, 6, 15):
            loader.load_state_dict(states[position])
            assert same(take(loader, 5), whole[position : position + 5])
    finally:
        loader.close()


def test_randomness_belongs_to_the_sample() -> None:
    def by_index(loader: Loader, epochs: int) -> dict[tuple[int, int], list[float]]:
        found = {}
        for epoch in range(epochs):
            for batch in loader:
                found.update({(epoch, int(row[0])): row.tolist() for row in batch})
        loader.close()
        return found

    alone = by_index(Loader(Noisy(), 3, rank=0, world_size=1), 2)
    shared = [by_index(Loader(Noisy(), 4, rank=rank, world_size=2, num_workers=rank * 2), 2) for rank in range(2)]
    assert {**shared[0], **shared[1]} == alone
    assert len(alone) == 40
    assert len({tuple(row[1:]) for row in alone.values()}) == 40
    assert by_index(Loader(Noisy(), 3, seed=1, rank=0, world_size=1), 2) != alone


def test_a_subset_is_still_seeded_sample_by_sample() -> None:
    plain = torch.cat(list(Loader(Noisy(), 4, shuffle=False, rank=0, world_size=1)))
    subset = Subset(Subset(Noisy(), range(20)), range(20))
    assert torch.equal(torch.cat(list(Loader(subset, 5, shuffle=False, rank=0, world_size=1))), plain)


def test_a_datasets_own_batched_read_is_used() -> None:
    class Many(Noisy):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.tensor([i, len(indices)]) + torch.rand(()) * 0 for i in indices]

    batch = Loader(Many(), 4, shuffle=False, rank=0, world_size=1).next_batch()
    assert batch.tolist() == [[0, 4], [1, 4], [2, 4], [3, 4]]


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_never_moves_the_training_generators(workers: int) -> None:
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # leaves half a pair of normals in the state
    before = generators()
    loader = Loader(Noisy(), 3, rank=0, world_size=1, num_workers=workers)
    take(loader, 9)
    loader.load_state_dict({"epoch": 0, "batch": 2})
    take(loader, 2)
    loader.close()
    assert generators() == before


@pytest.mark.parametrize("workers", [0, 1])
def test_a_collate_function_may_draw_too(workers: int) -> None:
    def mixed_up(samples: list[Any]) -> list[float]:
        return [torch.rand(()).item(), random.random(), float(np.random.rand())]

    data = TensorDataset(torch.arange(20))
    expected = take(Loader(data, 3, rank=0, world_size=1, collate_fn=mixed_up), 9)
    assert len({tuple(batch) for batch in expected}) == 9
    before = generators()
    loader = Loader(data, 3, rank=0, world_size=1, collate_fn=mixed_up, num_workers=workers)
    try:
        loader.load_state_dict({"epoch": 0, "batch": 4})
        assert take(loader, 5) == expected[4:]
    finally:
        loader.close()
    assert generators() == before


def test_generators_are_put_back_after_a_failing_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGROW_TEST_BAD", str(tmp_path))
    before = generators()
    loader = Loader(Bad(), 4, shuffle=False, rank=0, world_size=1)
    loader.next_batch()
    with pytest.raises(OSError, match="unreadable"):
        loader.next_batch()
    assert generators() == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failing_sample_leaves_the_cursor(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setenv("REGROW_TEST_BAD", str(broken))
    loader = Loader(Bad(), 4, shuffle=False, rank=0, world_size=1, num_workers=workers)
    try:
        loader.next_batch()
        with pytest.raises(OSError, match="unreadable"):
            loader.next_batch()
        broken.unlink()
        assert loader.next_batch().tolist() == [4, 5, 6, 7]
    finally:
        loader.close()


def test_a_prefetch_survives_a_cursor_that_returns_to_it() -> None:
    loader = Loader(Where(), 4, rank=0, world_size=1, num_workers=2)
    try:
        loader.next_batch()
        pids = loader.worker_pids
        back, here = {"epoch": 0, "batch": 0}, loader.state_dict()
        loader.load_state_dict(back)
        loader.load_state_dict(here)
        read_by = {int(pid) for batch in take(loader, 12) for pid in batch[:, 1]}  # over three epochs
        assert read_by <= set(pids)
        assert loader.worker_pids == pids
        loader.load_state_dict(back)
        loader.next_batch()
        assert set(loader.worker_pids).isdisjoint(pids)
        assert gone(pids)
    finally:
        pids = loader.worker_pids
        loader.close()
    assert gone(pids)


_FRESH = """
import sys, torch
from regrow.data import Loader
class Data:
    def __len__(self): return 4
    def __getitem__(self, i):
        import numpy
        return float(numpy.random.rand())
print([Loader(Data(), 1, rank=0, world_size=1).next_batch().item() for _ in range(2)])
"""


def test_the_first_sample_of_a_process_is_seeded_too() -> None:
    # numpy imports its generators when they are first used
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = [
        subprocess.run([sys.executable, "-c", _FRESH], env=env, capture_output=True, text=True, timeout=60, check=True)
        for _ in range(2)
    ]
    first, again = (eval(run.stdout) for run in runs)
    assert first == again
    assert first[0] == first[1]


def test_iteration_gives_the_rest_of_the_epoch() -> None:
    loader = Loader(Noisy(), 4, rank=0, world_size=1)
    take(loader, 2)
    assert len(loader) == 5
    assert len(list(loader)) == 3
    start = {"epoch": 1, "batch": 0, "skipped": 0}
    assert loader.state_dict() == {**start, "seed": 0, "samples": 20, "global_batch": 4}
    assert len(list(loader)) == 5


def test_the_seed_comes_with_the_cursor() -> None:
    first, other = Loader(Noisy(), 4, seed=5, rank=0, world_size=1), Loader(Noisy(), 4, rank=0, world_size=1)
    take(first, 2)
    take(other, 2)
    other.load_state_dict(first.state_dict())
    assert same(take(first, 4), take(other, 4))
    assert other.state_dict()["seed"] == 5


def test_a_cursor_of_another_dataset_or_of_no_place_is_refused() -> None:
    loader = Loader(Noisy(), 4, rank=0, world_size=1)
    with pytest.raises(ValueError, match="at batch 2 of an epoch with samples=30, here samples=20"):
        loader.load_state_dict({"epoch": 3, "batch": 2, "samples": 30})
    with pytest.raises(ValueError, match="at batch 0 of an epoch with samples=30, here samples=20"):
        loader.load_state_dict({"epoch": 3, "batch": 0, "skipped": 4, "samples": 30})
    with pytest.raises(ValueError, match="batch 5 is not in an epoch of 5"):
        loader.load_state_dict({"epoch": 3, "batch": 5})
    with pytest.raises(ValueError, match="batch 3 is not in an epoch of 3"):
        loader.load_state_dict({"epoch": 3, "batch": 3, "global_batch": 8})
    with pytest.raises(ValueError, match="batch 4 is not in an epoch of 4"):
        loader.load_state_dict({"epoch": 3, "batch": 4, "skipped": 6})
    for nowhere in ({"epoch": -1}, {"batch": -1}, {"skipped": -1}):
        with pytest.raises(ValueError, match="not a position"):
            loader.load_state_dict({"epoch": 0, "batch": 0, **nowhere})
    assert loader.epoch == 0
    loader.load_state_dict({"epoch": 3, "batch": 0, "global_batch": 8, "samples": 30})
    assert loader.epoch == 3


def test_binding() -> None:
    loader = Loader(Noisy(), 4)
    assert not loader.bound
    with pytest.raises(ValueError, match="does not know its rank"):
        loader.next_batch()
    loader.bind(1, 2)
    loader.bind(1, 2)
    assert loader.bound
    with pytest.raises(ValueError, match="cannot be bound to rank 0 of 2"):
        loader.bind(0, 2)
    with pytest.raises(ValueError, match="give both"):
        Loader(Noisy(), 4, rank=0)
    with pytest.raises(ValueError, match="20 samples for 21 ranks"):
        Loader(Noisy(), 1, rank=0, world_size=21)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"timeout": 3}, "need workers"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor=0"),
        ({"dataset": Endless()}, "map-style"),
        ({"dataset": 5}, "map-style"),
    ],
)
def test_arguments_are_checked_where_they_are_given(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Loader(**{"dataset": Noisy(), "rank": 0, "world_size": 1, **arguments})
