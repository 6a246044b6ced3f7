"""The data's cursor at another world size: the rest of an epoch is shared anew, and each sample is still read once."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_help import Noisy, share, take
from regrow.data import Loader
from regrow.data.share import Position


@dataclass(frozen=True)
class Part:
    """A part of a run: so many ranks with such batches, for so many steps."""

    world: int
    batch_size: int
    steps: int


def order_of(samples: int, epoch: int, *, shuffle: bool) -> list[int]:
    alone = share(samples=samples, batch_size=samples, shuffle=shuffle)
    return alone.indices(epoch, 0)


def turns(parts: list[list[int]]) -> list[int]:
    """The places of a global batch in their order: the ranks take turns."""
    longest = max(len(part) for part in parts)
    return [part[at] for at in range(longest) for part in parts if at < len(part)]


class Job:
    """Ranks that each read through a loader of their own; with every part they are made anew from rank 0's cursor."""

    def __init__(self, samples: int, **options: Any) -> None:
        self.samples = samples
        self.options = options
        self.state: dict[str, int] | None = None
        self.read: dict[int, list[int]] = {}
        self.left_out: dict[int, int] = {}
        self.loaders: list[Loader] = []

    def become(self, world: int, batch_size: int) -> None:
        before = None if self.state is None else self.state["epoch"]
        self.loaders = [
            Loader(range(self.samples), batch_size, rank=rank, world_size=world, collate_fn=list, **self.options)
            for rank in range(world)
        ]
        if self.state is not None:
            for loader in self.loaders:
                loader.load_state_dict(self.state)
            assert len({loader.left_out for loader in self.loaders}) == 1
            assert before is not None
            if self.loaders[0].left_out:
                self.left_out[before] = self.loaders[0].left_out
                assert self.loaders[0].epoch == before + 1
        self.state = self.loaders[0].state_dict()

    def step(self) -> list[int]:
        """One batch on every rank; returns how many samples each had."""
        epoch = self.loaders[0].epoch
        parts = [loader.next_batch() for loader in self.loaders]
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        self.state = states[0]
        self.read.setdefault(epoch, []).extend(turns(parts))
        return [len(part) for part in parts]

    def finish(self) -> None:
        """Read to the end of the epoch, and the next one as well."""
        epoch = self.loaders[0].epoch
        while self.loaders[0].epoch < epoch + 2:
            self.step()


def parts(samples: int) -> st.SearchStrategy[list[Part]]:
    return st.lists(
        st.builds(Part, st.integers(1, min(samples, 9)), st.integers(1, 6), st.integers(0, 12)), min_size=2, max_size=5
    )


@given(data=st.data(), samples=st.integers(1, 90), shuffle=st.booleans())
@settings(max_examples=120, deadline=None)
def test_every_sample_once_whatever_the_ranks_were(data: st.DataObject, samples: int, shuffle: bool) -> None:
    job = Job(samples, shuffle=shuffle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in data.draw(parts(samples)):
            job.become(part.world, part.batch_size)
            for _ in range(part.steps):
                sizes = job.step()
                assert min(sizes) >= 1
                assert max(sizes) - min(sizes) <= 1
                assert max(sizes) <= part.batch_size + 1
            if job.loaders[0].left_out:
                assert job.loaders[0].left_out < part.world
    job.finish()
    for epoch, read in job.read.items():  # not only each once: in the order of the undisturbed run, up to the end
        order = order_of(samples, epoch, shuffle=shuffle)
        assert read == order[: samples - job.left_out.get(epoch, 0)]
    assert job.read.keys() | job.left_out.keys() == set(range(job.loaders[0].epoch))


@given(data=st.data(), samples=st.integers(54, 120))
@settings(max_examples=40, deadline=None)
def test_drop_last_drops_less_than_one_batch(data: st.DataObject, samples: int) -> None:
    job = Job(samples, drop_last=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was asked for
        for part in data.draw(parts(samples)):
            job.become(part.world, part.batch_size)
            for _ in range(part.steps):
                assert job.step() == [part.batch_size] * part.world
            assert job.loaders[0].left_out < part.world * part.batch_size
    last = job.loaders[0].epoch
    job.finish()
    for epoch, read in job.read.items():
        assert read == order_of(samples, epoch, shuffle=True)[: len(read)]
    assert samples - len(job.read[last]) < part.world * part.batch_size
    assert samples - len(job.read[last + 1]) == samples % (part.world * part.batch_size)


def test_the_epoch_after_a_change_is_any_other() -> None:
    changed, fresh = Loader(Noisy(), 3, rank=0, world_size=2), Loader(Noisy(), 3, rank=0, world_size=2)
    changed.load_state_dict({"epoch": 4, "batch": 1, "global_batch": 13, "samples": 20})
    assert changed.state_dict() == {**fresh.state_dict(), "epoch": 4, "skipped": 13}
    assert [len(batch) for batch in changed] == [4]  # of 7 samples, the last one is joined to the 6 before
    fresh.load_state_dict({"epoch": 5, "batch": 0})
    assert changed.state_dict() == fresh.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(take(changed, 9), take(fresh, 9), strict=True))


def test_the_same_global_batch_on_more_ranks_keeps_its_numbers() -> None:
    two = share(samples=20, batch_size=4, world_size=2)
    four = share(samples=20, batch_size=2, world_size=4)
    assert four.resume(Position(1, 1), two.global_batch) == (Position(1, 1), 0)
    assert four.resume(Position(1, 2), two.global_batch) == (Position(1, 2), 0)
    # but a last batch of 3, which two ranks had for themselves, is not enough for four
    four = share(samples=19, batch_size=2, world_size=4)
    assert four.resume(Position(1, 1), two.global_batch) == (Position(1, 1), 0)
    assert four.resume(Position(1, 2), two.global_batch) == (Position(2, 0), 3)


def test_a_size_that_returns_goes_on_from_where_the_epoch_stands() -> None:
    eight, six = share(samples=40, batch_size=8), share(samples=40, batch_size=6)
    assert six.resume(Position(0, 2), 8) == (Position(0, 0, 16), 0)
    assert eight.resume(Position(0, 1, 16), 6) == (Position(0, 0, 22), 0)
    assert eight.after(0, 0, 22) == Position(0, 1, 22)
    assert eight.after(0, 1, 22) == Position(0, 2, 22)  # the last 2 of 18: enough for one rank
    assert eight.after(0, 2, 22) == Position(1, 0)
    assert len(eight.indices(0, 2, 22)) == 2
    with pytest.raises(ValueError, match="batch 3 is not in an epoch of 3"):
        eight.indices(0, 3, 22)


def test_too_few_samples_for_the_ranks_begin_the_next_epoch_and_are_told_of() -> None:
    loaders = [Loader(Noisy(), 2, rank=rank, world_size=4) for rank in range(4)]
    state = {"epoch": 2, "batch": 6, "global_batch": 3, "samples": 20}
    with pytest.warns(RuntimeWarning, match="2 of 20 samples of epoch 2 are left out.*4 ranks.*epoch 3 begins"):
        loaders[0].load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one rank speaks for all
        for loader in loaders[1:]:
            loader.load_state_dict(state)
    assert [loader.left_out for loader in loaders] == [2] * 4
    begun = {"epoch": 3, "batch": 0, "skipped": 0, "seed": 0, "samples": 20, "global_batch": 8}
    assert [loader.state_dict() for loader in loaders] == [begun] * 4
    loaders[0].load_state_dict(loaders[0].state_dict())
    assert loaders[0].left_out == 0


def test_cursors_from_before_there_was_skipped_are_read() -> None:
    old = {"epoch": 1, "batch": 3, "seed": 7, "samples": 20, "global_batch": 4}
    loader = Loader(Noisy(), 4, rank=0, world_size=1)
    loader.load_state_dict(old)
    assert loader.state_dict() == {**old, "skipped": 0}


def test_workers_read_the_rest_and_go_on() -> None:
    options: dict[str, Any] = {"seed": 3, "rank": 1, "world_size": 3}
    state = {"epoch": 0, "batch": 3, "seed": 3, "samples": 40, "global_batch": 5}
    plain = Loader(Noisy(40), 3, **options)
    plain.load_state_dict(state)
    expected = take(plain, 8)
    loader = Loader(Noisy(40), 3, **options, num_workers=2)
    try:
        take(loader, 2)  # a prefetch that stands elsewhere
        loader.load_state_dict(state)
        got = take(loader, 4)
        pids = loader.worker_pids
        loader.load_state_dict(loader.state_dict())
        got += take(loader, 4)
        assert loader.worker_pids == pids
    finally:
        loader.close()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert [len(batch) for batch in got] == [3, 3, 2, 3, 3, 3, 3, 1]
