"""Which samples a rank reads in which batch of which epoch. Pure arithmetic: no dataset, no processes, no state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from regrow.data.shuffle import Permutation


class Position(NamedTuple):
    """Where a batch is: what a cursor counts, and what travels to the workers that read ahead."""

    epoch: int
    batch: int
    """Counted from ``skipped`` on, in global batches of the share's size."""
    skipped: int = 0
    """Samples of this epoch, over all ranks, that were read in global batches of another size. 0 in any other epoch."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of every epoch.

    An epoch is a row of *global* batches of ``batch_size * world_size`` samples. Within one, the ranks take turns
    (rank r has the places r, r + world_size, ...), so each sample is read by exactly one rank, exactly once per epoch.

    The last global batch may be partial. It is split as evenly as it goes (sizes differ by one at most). If it has
    fewer samples than there are ranks, some rank would have nothing to compute, so these samples are joined to the
    batch before: some ranks then get one sample more than ``batch_size``. With ``drop_last`` the partial batch is left
    out instead.

    Where an epoch was begun with another ``world_size`` or ``batch_size``, its first ``skipped`` samples were read by
    then. The rest of it is cut into global batches of this share's size from there on, by the same rules; ``resume``
    finds the position. The order of the samples depends on neither, so that each is still read once.
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
        return self.batches_after(0)

    def batches_after(self, skipped: int) -> int:
        """Return how many batches an epoch has after its first so many samples: 0 if what is left makes none."""
        full, rest = divmod(self.samples - skipped, self.global_batch)
        return full + (not self.drop_last and rest >= self.world_size)

    def indices(self, epoch: int, batch: int, skipped: int = 0) -> list[int]:
        """Return the dataset indices of this rank's batch. The cost depends on the batch's size only."""
        batches = self.batches_after(skipped)
        if not 0 <= batch < batches:
            raise ValueError(f"batch {batch} is not in an epoch of {batches}")
        start = skipped + batch * self.global_batch
        last = batch == batches - 1
        end = self.samples if last and not self.drop_last else start + self.global_batch
        if not self.shuffle:
            return list(range(start + self.rank, end, self.world_size))
        places = np.arange(start + self.rank, end, self.world_size, dtype=np.uint64)
        chosen: list[int] = _order(self.samples, self.seed, epoch).at(places).tolist()
        return chosen

    def after(self, epoch: int, batch: int, skipped: int = 0) -> Position:
        """Return the position that follows, in the next epoch if need be."""
        if batch + 1 < self.batches_after(skipped):
            return Position(epoch, batch + 1, skipped)
        return Position(epoch + 1, 0)

    def resume(self, position: Position, global_batch: int) -> tuple[Position, int]:
        """Find the position, here, of a cursor that counted global batches of another size (or of the same).

        Also returned: how many samples of the epoch are left out. They are none, unless what remains of the epoch makes
        no batch: fewer samples than there are ranks, and no batch before that they could be joined to, since that one
        is trained on already. No rank may have an empty batch, so the next epoch begins. With ``drop_last`` the same
        happens to less than one global batch.
        """
        epoch, batch, skipped = position
        read = skipped + batch * global_batch
        if read >= self.samples:
            batches = max(0, -(-(self.samples - skipped) // global_batch))  # of the cursor's own size
            raise ValueError(f"batch {batch} is not in an epoch of {batches}")
        if self.batches_after(read) == 0:
            return Position(epoch + 1, 0), self.samples - read
        # an unchanged size keeps its numbers, and with them a prefetch that stands there
        return (position if global_batch == self.global_batch else Position(epoch, 0, read)), 0


# the round keys of an epoch are worth keeping from batch to batch; two epochs meet where one ends
@lru_cache(maxsize=8)
def _order(samples: int, seed: int, epoch: int) -> Permutation:
    return Permutation(samples, seed, epoch)
