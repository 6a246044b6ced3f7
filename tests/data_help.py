"""Data sets and small questions that the tests of the loader share."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import Dataset, IterableDataset

from regrow.data import Loader, Share


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


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))
