"""The resumable loader: exactly once, anywhere, from any process, whatever dies."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from regrow.data import Loader, Share, resumable
from regrow.data.shuffle import Permutation, mix


class Noisy(Dataset[Any]):
    """Each sample draws from every generator that an augmentation may use."""

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class Where(Noisy):
    """Each sample tells which process read it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


class Bad(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5 and Path(os.environ["REGROW_TEST_BAD"]).exists():
            raise OSError("unreadable")
        return torch.tensor(index)


def share(**changes: Any) -> Share:
    fields: dict[str, Any] = {
        "samples": 20, "batch_size": 2, "rank": 0, "world_size": 1, "seed": 0, "shuffle": True, "drop_last": False,
    }  # fmt: skip
    return Share(**{**fields, **changes})


def take(loader: Loader, count: int) -> list[Any]:
    return [loader.next_batch() for _ in range(count)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def generators() -> tuple[bytes, Any, bytes]:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr((kind, keys.tobytes(), rest)).encode()


def gone(pids: list[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.02)
    return False


# the shuffle


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


# how ranks share an epoch


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


# the loader


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


def test_workers_of_one_epoch_only_when_asked_for() -> None:
    loader = Loader(Where(), 4, rank=0, world_size=1, num_workers=1, persistent_workers=False)
    seen = []
    for _ in range(2):
        seen.append({int(pid) for batch in loader for pid in batch[:, 1]})
        assert loader.worker_pids == []
    assert [len(pids) for pids in seen] == [1, 1]
    assert seen[0] != seen[1]


@pytest.mark.parametrize("swallow", [False, True])
def test_a_killed_worker_is_an_exception_and_the_next_call_goes_on(swallow: bool) -> None:
    whole = take(Loader(Noisy(), 2, rank=0, world_size=1), 20)
    loader = Loader(Noisy(), 2, rank=0, world_size=1, num_workers=2)
    got = take(loader, 3)
    pids = loader.worker_pids
    try:
        # torch's SIGCHLD handler raises wherever the main thread is: here, or in next_batch
        try:
            os.kill(pids[0], signal.SIGKILL)
            if swallow:
                gone(pids[:1])
        except RuntimeError:
            assert swallow or loader.state_dict()["batch"] == 3
        with pytest.raises(RuntimeError, match=r"[Ww]orker"):
            for _ in range(20):
                got.append(loader.next_batch())
        assert gone(pids)
        got += take(loader, 20 - len(got))
    finally:
        loader.close()
    assert same(got, whole)


class Stopping(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.tensor(index)


def test_a_stopped_worker_is_a_timeout_and_then_killed() -> None:
    loader = Loader(Stopping(), 2, shuffle=False, rank=0, world_size=1, num_workers=1, prefetch_factor=1, timeout=2)
    try:
        loader.next_batch()
        pids = loader.worker_pids
        with pytest.raises(RuntimeError, match="timed out"):
            loader.next_batch()
    finally:
        loader.close()
    assert gone(pids)


_RANK_WITH_WORKERS = """
import os, signal, sys, torch
from regrow.data import Loader
class Data:
    def __len__(self): return 8
    def __getitem__(self, i): return torch.tensor(i)
loader = Loader(Data(), 2, rank=0, world_size=1, num_workers=2)
loader.next_batch()
print(*loader.worker_pids, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PDEATHSIG is Linux's")
def test_workers_die_with_a_killed_rank() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    rank = subprocess.Popen(
        [sys.executable, "-c", _RANK_WITH_WORKERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert rank.stdin is not None
    assert rank.stdout is not None
    try:
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        rank.kill()
        rank.wait(timeout=20)
        rank.stdin.close()
        rank.stdout.close()
    assert gone(pids, within_s=3)  # torch's own watch looks every 5 s


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


def test_a_worker_sees_the_users_dataset(tmp_path: Path) -> None:
    class Needy(Noisy):
        path: Path | None = None

        def __getitem__(self, index: int) -> torch.Tensor:
            assert self.path is not None
            return torch.tensor(index)

    def open_it(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        assert isinstance(info.dataset, Needy)
        info.dataset.path = tmp_path / str(worker_id)

    loader = Loader(Needy(), 20, shuffle=False, rank=0, world_size=1, num_workers=1, worker_init_fn=open_it)
    try:
        assert loader.next_batch().tolist() == list(range(20))
    finally:
        loader.close()


def test_spawned_workers_read_the_same() -> None:
    expected = take(Loader(Noisy(), 8, rank=0, world_size=1), 3)
    loader = Loader(Noisy(), 8, rank=0, world_size=1, num_workers=1, multiprocessing_context="spawn")
    try:
        assert same(take(loader, 3), expected)
    finally:
        loader.close()


def test_iteration_gives_the_rest_of_the_epoch() -> None:
    loader = Loader(Noisy(), 4, rank=0, world_size=1)
    take(loader, 2)
    assert len(loader) == 5
    assert len(list(loader)) == 3
    assert loader.state_dict() == {"epoch": 1, "batch": 0, "seed": 0, "samples": 20, "global_batch": 4}
    assert len(list(loader)) == 5


def test_the_seed_comes_with_the_cursor() -> None:
    first, other = Loader(Noisy(), 4, seed=5, rank=0, world_size=1), Loader(Noisy(), 4, rank=0, world_size=1)
    take(first, 2)
    take(other, 2)
    other.load_state_dict(first.state_dict())
    assert same(take(first, 4), take(other, 4))
    assert other.state_dict()["seed"] == 5


def test_a_cursor_of_another_shape_is_refused() -> None:
    loader = Loader(Noisy(), 4, rank=0, world_size=1)
    with pytest.raises(ValueError, match="global_batch=8, here global_batch=4"):
        loader.load_state_dict({"epoch": 3, "batch": 2, "global_batch": 8})
    with pytest.raises(ValueError, match="samples=30"):
        loader.load_state_dict({"epoch": 3, "batch": 2, "samples": 30})
    with pytest.raises(ValueError, match="batch 5 is not in an epoch of 5"):
        loader.load_state_dict({"epoch": 3, "batch": 5})
    with pytest.raises(ValueError, match="not a position"):
        loader.load_state_dict({"epoch": -1, "batch": 0})
    assert loader.epoch == 0
    loader.load_state_dict({"epoch": 3, "batch": 0, "global_batch": 8})
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


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


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


# an existing DataLoader


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
