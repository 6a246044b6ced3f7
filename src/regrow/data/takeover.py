"""Make an existing DataLoader resumable: its dataset and options are kept, its sampler is replaced."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from regrow.data.loader import Loader


def resumable(loader: DataLoader[Any] | Loader, *, seed: int | None = None) -> Loader:
    """Return a :class:`Loader` that reads what ``loader`` reads, and can be taken up anywhere.

    Shuffling is kept as such; the order itself is another one, since it must be known at any position (without
    shuffling it is the same). A ``DistributedSampler`` gives rank, world size and seed; its padding (repeated samples)
    is not kept. The seed of a plain ``shuffle=True`` is ``seed``, or 0: not the loader's generator, which may differ
    from rank to rank. A ``Loader`` is returned as it is. The DataLoader must not be used any more.
    """
    if isinstance(loader, Loader):
        if seed is not None and seed != loader.seed:
            raise ValueError(f"the Loader has seed={loader.seed}: give it seed={seed} where it is made")
        return loader
    if not isinstance(loader, DataLoader):
        raise ValueError(f"a torch DataLoader or a regrow.data.Loader is needed, not a {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "an IterableDataset has no positions to resume at: make it map-style (__getitem__ and __len__), or "
            "protect an object of your own that has next_batch, state_dict and load_state_dict"
        )
    if loader.batch_size is None:
        raise ValueError(
            "batch_size=None or a batch_sampler: the loader must know how batches are made up to resume inside "
            "an epoch; give batch_size (and shuffle), or let the dataset's items be the batches and "
            "use regrow.data.Loader"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise ValueError(
            f"{type(loader.batch_sampler).__name__} cannot be entered at a position: give batch_size instead"
        )
    shuffle, sampled = _sampling(loader)
    if seed is not None:
        sampled["seed"] = seed
    return Loader(
        loader.dataset,
        loader.batch_size,
        shuffle=shuffle,
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        prefetch_factor=loader.prefetch_factor,
        # without workers the option says nothing; with them, whoever wants fresh ones for each epoch keeps that
        persistent_workers=loader.persistent_workers or loader.num_workers == 0,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
        **sampled,
    )


def _sampling(loader: DataLoader[Any]) -> tuple[bool, dict[str, int]]:
    """Whether it shuffles; and the rank, world size and seed, where the sampler has them."""
    sampler: Any = loader.sampler
    size = len(cast(Sized, loader.dataset))
    if type(sampler) is SequentialSampler:
        return False, {}
    if type(sampler) is DistributedSampler:
        if len(cast(Sized, sampler.dataset)) != size:
            raise ValueError("the DistributedSampler is made for another dataset than the DataLoader's")
        return sampler.shuffle, {"rank": sampler.rank, "world_size": sampler.num_replicas, "seed": sampler.seed}
    if type(sampler) is RandomSampler:
        if sampler.replacement or sampler.num_samples != size:
            raise ValueError(
                "a RandomSampler with replacement or num_samples reads no whole epochs, so a position in it "
                "says nothing: use shuffle=True, or wrap the dataset so that its indices are the ones you want"
            )
        return True, {}
    raise ValueError(
        f"{type(sampler).__name__} cannot be entered at a position: use shuffle=True or False, or wrap the dataset so "
        "that its indices are the ones you want (torch.utils.data.Subset takes any list of them)"
    )
