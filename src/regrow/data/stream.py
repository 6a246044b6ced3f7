"""One running prefetch: a stock DataLoader iterator that starts at a cursor and goes on through the epochs.

It is never rewound. When the cursor goes elsewhere, the stream is stopped and another one started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.signal_handling import _remove_worker_pids  # type: ignore[attr-defined]
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from regrow.data.seeded import SeededBatches, WorkerStart, draws_nothing, generators_untouched
from regrow.data.share import Position, Share

_GONE_AFTER_KILL_S = 5.0
_DYING_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How batches are read: the options that a DataLoader takes, under its names."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    multiprocessing_context: Any = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout: float = 0

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers}: 0 reads in this process, more starts as many workers")
        if self.num_workers == 0 and (self.prefetch_factor is not None or self.timeout):
            raise ValueError("prefetch_factor and timeout need workers: give num_workers=1 or more")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor={self.prefetch_factor}: at least 1 batch per worker is needed")


class _WorkersIterator(_MultiProcessingDataLoaderIter):
    """Torch's, but for a dead worker: torch would ask an event whose lock that worker may have died with, and hang."""

    def _mark_worker_as_unavailable(self, worker_id: int, shutdown: bool = False) -> None:
        if not shutdown:
            raise RuntimeError(f"a data loading worker is gone (pid {self._workers[worker_id].pid})")
        super()._mark_worker_as_unavailable(worker_id, shutdown)


class _Loader(DataLoader[Any]):
    def _get_iterator(self) -> _BaseDataLoaderIter:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        return _WorkersIterator(self)


class _Onwards:
    """The positions from a start on: for ever, or to the end of the epoch."""

    def __init__(self, share: Share, start: Position, *, endless: bool) -> None:
        self._share, self._start, self._endless = share, start, endless

    def __iter__(self) -> Iterator[Position]:
        position = self._start
        while self._endless or position.epoch == self._start.epoch:
            yield position
            position = self._share.after(*position)


class Stream:
    """Batches of one rank from ``position`` on. ``position`` is what ``next`` will return."""

    def __init__(self, dataset: Any, share: Share, reading: Reading, position: Position) -> None:
        self.share = share
        self.position = position
        draws = not draws_nothing(dataset) or reading.collate_fn not in (None, default_collate)
        self._guard = generators_untouched if draws and reading.num_workers == 0 else nullcontext
        # PDEATHSIG is about the thread that forks: a worker of a passing thread would die with that thread
        dies_with_parent = threading.current_thread() is threading.main_thread()
        loader = _Loader(
            SeededBatches(dataset, share, draws=draws),
            batch_sampler=_Onwards(share, position, endless=reading.persistent_workers),  # type: ignore[arg-type]
            num_workers=reading.num_workers,
            collate_fn=reading.collate_fn,
            pin_memory=reading.pin_memory,
            prefetch_factor=reading.prefetch_factor,
            multiprocessing_context=reading.multiprocessing_context,
            worker_init_fn=WorkerStart(dataset, reading.worker_init_fn, dies_with_parent=dies_with_parent),
            timeout=reading.timeout,
            # an iterator draws its workers' base seed on creation: not from the training's generator
            generator=torch.Generator(),
        )
        self._iterator: Any = iter(loader)

    def next(self) -> Any:
        """Return the batch at ``position`` and move on. After an exception the stream is good for ``stop`` only."""
        self._check_workers()
        try:
            with self._guard():
                batch = next(self._iterator)
        except (ConnectionError, EOFError, FileNotFoundError):
            # also what a worker's death in the middle of handing over a tensor looks like
            self._check_workers(wait_s=_DYING_S)
            raise
        self.position = self.share.after(*self.position)
        return batch

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers (none if batches are read in this process)."""
        return [worker.pid for worker in self._workers]

    @property
    def _workers(self) -> list[Any]:
        return getattr(self._iterator, "_workers", [])

    def _check_workers(self, wait_s: float = 0) -> None:
        # torch tells of a dead worker once, wherever the main thread is then; whoever swallowed that must not wait here
        if wait_s and self._workers:
            ending = wait([worker.sentinel for worker in self._workers], timeout=wait_s)
            for worker in self._workers:
                if worker.sentinel in ending:  # its files are closed; a moment later it can be waited for
                    worker.join(timeout=wait_s)
        dead = [worker for worker in self._workers if not worker.is_alive()]
        if dead:
            told = ", ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in dead)
            raise RuntimeError(f"a data loading worker is gone ({told})")

    def stop(self, *, at_once: bool = False) -> None:
        """End the workers: in good order, or by SIGKILL if one is dead already or ``at_once`` is asked for."""
        iterator, workers = self._iterator, self._workers
        self._iterator = iter(())
        if not workers:
            return
        if not at_once and all(worker.is_alive() for worker in workers):
            iterator._shutdown_workers()
        else:
            # a killed worker may have held a lock of the queues for ever: the orderly way would wait for it
            iterator._shutdown = True
            if hasattr(iterator, "_pin_memory_thread_done_event"):
                iterator._pin_memory_thread_done_event.set()
            _remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
        for worker in workers:
            if worker.is_alive():
                worker.kill()
                worker.join(timeout=_GONE_AFTER_KILL_S)
