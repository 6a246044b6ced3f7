"""The resumable loader: an endless stream of epochs with a cursor of a few integers.

It never writes anything, never talks to other ranks, and never moves the training's random generators.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

from regrow.data.share import Position, Share
from regrow.data.stream import Reading, Stream


class Loader:
    """Batches of a map-style dataset that can be taken up at any position, in constant time.

    - Over all ranks each sample is read exactly once per epoch, whatever dies and wherever it resumes. How the ranks
      share an epoch, and what happens to a last partial batch, is told in :class:`regrow.data.Share`: such a batch is
      split evenly; if it has fewer samples than there are ranks they are joined to the batch before.
    - A cursor may be taken up by another number of ranks, or with another ``batch_size``, inside an epoch too: the rest
      of the epoch is shared anew. See ``load_state_dict`` for the one case in which samples are left out.
    - The order is a function of (seed, epoch); randomness inside the dataset one of (seed, epoch, index). Both are the
      same in any process.
    - With ``num_workers`` batches are read ahead, across the ends of epochs; with ``persistent_workers=False`` the
      workers are started anew for each epoch (for a dataset that is changed in between). A worker that dies is an
      exception in ``next_batch``; calling it again starts new workers at the same batch. ``timeout`` is torch's: a
      worker that is stopped while it hands over a tensor is not covered by it.

    Not for use from several threads at once.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        multiprocessing_context: Any = None,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout: float = 0,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise ValueError(
                f"{type(dataset).__name__} cannot be entered at an index: the loader needs a map-style dataset "
                "(__getitem__ and __len__); for a stream, keep the cursor in your own object "
                "with state_dict/load_state_dict"
            )
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank={rank} and world_size={world_size}: give both, or neither")
        self.dataset = dataset
        self._sharing: dict[str, Any] = {
            "samples": len(dataset),
            "batch_size": batch_size,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        self._seed = seed
        self._reading = Reading(
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_init_fn=worker_init_fn,
            timeout=timeout,
        )
        self._share: Share | None = None
        self._position = Position(0, 0)
        self._left_out = 0
        self._stream: Stream | None = None
        if rank is not None and world_size is not None:
            self.bind(rank, world_size)

    @property
    def bound(self) -> bool:
        """Whether the loader knows its rank."""
        return self._share is not None

    def bind(self, rank: int, world_size: int) -> None:
        """Say whose batches these are. The same again is nothing; another rank than before is a ``ValueError``."""
        if self._share is None:
            self._share = Share(rank=rank, world_size=world_size, seed=self._seed, **self._sharing)
        elif (rank, world_size) != (self._share.rank, self._share.world_size):
            raise ValueError(
                f"the loader reads for rank {self._share.rank} of {self._share.world_size}: it cannot be bound to "
                f"rank {rank} of {world_size}"
            )

    def _bound(self) -> Share:
        if self._share is None:
            if not (dist.is_available() and dist.is_initialized()):
                raise ValueError(
                    "the loader does not know its rank: give rank= and world_size= (0 and 1 for a single process), "
                    "or protect it first, or use it after the process group is initialised"
                )
            self.bind(dist.get_rank(), dist.get_world_size())
            assert self._share is not None
        return self._share

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._position.epoch

    @property
    def left_out(self) -> int:
        """Samples of the cursor's epoch, over all ranks, that the last ``load_state_dict`` left out: see there."""
        return self._left_out

    @property
    def seed(self) -> int:
        """The seed of order and augmentation."""
        return self._seed

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [] if self._stream is None else self._stream.worker_pids

    def __len__(self) -> int:
        return self._bound().batches

    def next_batch(self) -> Any:
        """Return the next batch and move the cursor; the last batch of an epoch is followed by the first of the next.

        If reading fails the cursor stays, and the next call tries the same batch again.
        """
        share = self._bound()
        stream = self._stream
        if stream is not None and (stream.position != self._position or stream.share != share):
            self.close()
            stream = None
        if stream is None:
            stream = self._stream = Stream(self.dataset, share, self._reading, self._position)
        try:
            batch = stream.next()
        except BaseException:  # whatever it was, the stream has lost its place, and its workers may answer no more
            self._stream = None
            stream.stop(at_once=True)
            raise
        epoch, self._position = self._position.epoch, stream.position
        if self._position.epoch != epoch and not self._reading.persistent_workers:
            self.close()
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the current epoch."""
        epoch = self._position.epoch
        while self._position.epoch == epoch:
            yield self.next_batch()

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: where the next batch is, and what its number means."""
        share = self._bound()
        epoch, batch, skipped = self._position
        return {
            "epoch": epoch,
            "batch": batch,
            "skipped": skipped,
            "seed": self._seed,
            "samples": share.samples,
            "global_batch": share.global_batch,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Put the cursor anywhere. Costs nothing: a prefetch is given up only when the next batch is another one.

        The seed is taken over. If the size of global batches has changed inside the epoch (another number of ranks,
        another ``batch_size``), the rest of the epoch is cut into batches of the new size from there on: each sample is
        still read once. If what is left of the epoch makes no batch, because it has fewer samples than there are ranks
        (with ``drop_last``: than a global batch), the next epoch begins; ``left_out`` then says how many samples were
        not read, and rank 0 warns of them (not with ``drop_last``, which asks for that). A dataset of another size is
        refused inside an epoch, since its order is another one; the start of an epoch is always taken.
        """
        share, seed = self._bound(), state.get("seed", self._seed)
        position = Position(state["epoch"], state["batch"], state.get("skipped", 0))
        left_out = 0
        if min(position) < 0:
            raise ValueError(f"epoch {position.epoch}, batch {position.batch} is not a position")
        if position != Position(position.epoch, 0):
            samples, global_batch = state.get("samples", share.samples), state.get("global_batch", share.global_batch)
            if samples != share.samples:
                raise ValueError(
                    f"the cursor stands at batch {position.batch} of an epoch with samples={samples}, here "
                    f"samples={share.samples}: keep the dataset, or set batch=0 and skipped=0 to begin the epoch again"
                )
            position, left_out = share.resume(position, global_batch)
        if seed != self._seed:
            self._seed = seed
            self._share = Share(rank=share.rank, world_size=share.world_size, seed=seed, **self._sharing)
        self._position, self._left_out = position, left_out
        if left_out and share.rank == 0 and not share.drop_last:
            warnings.warn(
                f"{left_out} of {share.samples} samples of epoch {position.epoch - 1} are left out: they are fewer "
                f"than the {share.world_size} ranks that the run now has, so epoch {position.epoch} begins",
                RuntimeWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """End the workers. The cursor stays; the next batch starts new ones."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.stop()
