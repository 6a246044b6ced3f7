"""Which samples a rank reads in which batch of which epoch. Pure arithmetic: no dataset, no processes, no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from regrow.data.shuffle import Permutation


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of every epoch.

    An epoch is a row of *global* batches of ``batch_size * world_size`` samples. Within one, the ranks take turns
    (rank r has the places r, r + world_size, ...), so each sample is read by exactly one rank, exactly once per epoch.

    The last global batch may be partial. It is split as evenly as it goes (sizes differ by one at most). If it has
    fewer samples than there are ranks, some rank would have nothing to compute, so these samples are joined to the
    batch before: some ranks then get one sample more than ``batch_size``. With ``drop_last`` the partial batch is left
    out instead.
    """

    samples: int
    batch_size: int
    rank: int
    world_size: int
    seed: int
    shuffle: bool
    drop_last: bool

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is not in a world of {self.world_size} ranks")
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size}: at least 1 is needed")
        if self.samples < self.world_size:
            raise ValueError(
                f"the dataset has {self.samples} samples for {self.world_size} ranks: each rank needs at least one; "
                "use more samples or fewer ranks"
            )
        if self.batches == 0:
            raise ValueError(
                f"drop_last leaves nothing: {self.samples} samples are less than one global batch "
                f"of {self.global_batch} ({self.batch_size} on each of {self.world_size} ranks); use a "
                "smaller batch_size or drop_last=False"
            )

    @property
    def global_batch(self) -> int:
        """Samples that all ranks together read in a full batch."""
        return self.batch_size * self.world_size

    @property
    def batches(self) -> int:
        """Batches per epoch: the same on every rank."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + (not self.drop_last and rest >= self.world_size)

    def indices(self, epoch: int, batch: int) -> list[int]:
        """Return the dataset indices of this rank's batch. The cost depends on the batch's size only."""
        if not 0 <= batch < self.batches:
            raise ValueError(f"batch {batch} is not in an epoch of {self.batches}")
        start = batch * self.global_batch
        last = batch == self.batches - 1
        end = self.samples if last and not self.drop_last else start + self.global_batch
        if not self.shuffle:
            return list(range(start + self.rank, end, self.world_size))
        places = np.arange(start + self.rank, end, self.world_size, dtype=np.uint64)
        chosen: list[int] = _order(self.samples, self.seed, epoch).at(places).tolist()
        return chosen

    def after(self, epoch: int, batch: int) -> tuple[int, int]:
        """Return the position that follows, in the next epoch if need be."""
        return (epoch, batch + 1) if batch + 1 < self.batches else (epoch + 1, 0)


# the round keys of an epoch are worth keeping from batch to batch; two epochs meet where one ends
@lru_cache(maxsize=8)
def _order(samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(samples, seed, epoch)
