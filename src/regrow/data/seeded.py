"""Randomness while loading that belongs to the sample, not to the process that happens to read it.

``torch``, ``random`` and ``numpy.random`` are seeded from (seed, epoch, index) before each sample
is read, so an augmentation comes out the same in any worker, before and after any failure. What ``collate_fn`` draws
goes on from the batch's last sample. Generators of accelerators are not touched: a dataset that draws on a GPU is on
its own.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from regrow.data.share import Position, Share
from regrow.data.shuffle import mix

_PR_SET_PDEATHSIG = 1
_LAST_BREATH_S = 0.01  # the kernel gives a dying process's children away a moment before it shows that it ended


def seed_all(seed: int) -> None:
    """Seed the generators of this process that a dataset may draw from."""
    # not torch.manual_seed: that one also queues a call for each accelerator, for every sample
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Put the generators back on the way out: reading data must not move the training's randomness."""
    of_torch, of_python, of_numpy = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


class SeededBatches(Dataset[Any]):
    """What a DataLoader (and its workers) sees: asked for a position, it gives the samples of this rank's batch.

    A dataset's own ``__getitems__`` is used if it has one; the generators are then seeded once for the batch, from its
    first index, since what it does for the single sample cannot be seen from here. The same where reading a sample is
    known to draw nothing (tensors in memory): seeding costs 8 microseconds a sample. ``draws=False`` says that
    collating draws nothing either: nothing is seeded then.
    """

    def __init__(self, dataset: Any, share: Share, *, draws: bool = True) -> None:
        self._dataset = dataset
        self._share = share
        self._draws = draws
        self._read_many: Callable[[list[int]], Sequence[Any]] | None = None
        if callable(getattr(_source(dataset), "__getitems__", None)):
            self._read_many = dataset.__getitems__
        elif draws_nothing(dataset):
            self._read_many = self._read_each

    def __getitems__(self, position: Position) -> Sequence[Any]:
        """Read a batch. ``position`` is what the stream's batch sampler yields."""
        epoch = position.epoch
        indices, seed = self._share.indices(*position), self._share.seed
        if self._read_many is not None:
            if self._draws:
                seed_all(mix(seed, epoch, indices[0]))
            return self._read_many(indices)
        samples = []
        for index in indices:
            seed_all(mix(seed, epoch, index))
            samples.append(self._dataset[index])
        return samples

    def _read_each(self, indices: list[int]) -> list[Any]:
        return [self._dataset[index] for index in indices]


def draws_nothing(dataset: Any) -> bool:
    """Whether reading a sample is known to use no generator; anything that is not known here may."""
    return type(_source(dataset)) in (TensorDataset, torch.Tensor, list, tuple, range)


def _source(dataset: Any) -> Any:
    # a Subset has __getitems__ in any case, and reads one by one if what it selects from has none
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


class WorkerStart:
    """Runs in each DataLoader worker before its first batch."""

    def __init__(self, dataset: Any, worker_init_fn: Callable[[int], None] | None, *, dies_with_parent: bool) -> None:
        self._dataset = dataset
        self._worker_init_fn = worker_init_fn
        self._dies_with_parent = dies_with_parent
        self._rank = os.getpid()

    def __call__(self, worker_id: int) -> None:
        """Bind the worker's life to the rank's, show it the user's dataset, call the user's function."""
        if self._dies_with_parent:
            # a forked worker holds the rank's sockets open: while it lives, the other ranks do not see that the rank
            # died
            _die_with(self._rank)
        info = get_worker_info()
        assert info is not None
        # WorkerInfo is frozen; the user's worker_init_fn expects its own dataset there, not our wrapper of it
        object.__setattr__(info, "dataset", self._dataset)
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def _die_with(rank: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # a rank that died before the prctl sends no signal; a fork server is a parent that is not the rank
        if os.getppid() != rank and _has_ended(rank):
            os._exit(1)


def _has_ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], _LAST_BREATH_S)[0])
    finally:
        os.close(descriptor)
