"""Slots that outlive a worker, the small state, and the streaming of tensors."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regrow.ids import Step
from regrow.slots import Slots
from regrow.state import checkpoint, transfer
from regrow.state.registry import Registry, per_rank
from regrow.state.small import LARGE_BYTES, SmallState


def test_slots_keep_two_starts_and_the_newest_within_a_step(tmp_path):
    slots = Slots(tmp_path / "rank0")
    for step in range(4):
        slots.start(Step(step), f"start {step}".encode())
        slots.live(Step(step), f"live {step}".encode())
    left = Slots(tmp_path / "rank0").left()
    assert left.starts == {2: b"start 2", 3: b"start 3"}
    assert left.live == (3, b"live 3")
    assert Slots(tmp_path / "rank0").last_step() == 3


def test_a_step_in_which_nothing_was_published_has_not_changed_since_its_start(tmp_path):
    slots = Slots(tmp_path / "rank0")
    slots.start(Step(6), b"six")
    slots.live(Step(6), b"six, later")
    slots.start(Step(7), b"seven")
    assert Slots(tmp_path / "rank0").left().live == (7, b"seven")


def test_a_successor_goes_on_where_its_predecessor_stopped(tmp_path):
    first = Slots(tmp_path / "rank0")
    first.live(Step(0), b"old")
    second = Slots(tmp_path / "rank0")
    second.left()
    second.live(Step(1), b"new")
    assert Slots(tmp_path / "rank0").left().live == (1, b"new")


@pytest.mark.parametrize("offset", [0, 9, 40])
def test_a_damaged_slot_is_passed_over(tmp_path, offset):
    slots = Slots(tmp_path / "rank0")
    slots.start(Step(4), b"four" * 20)
    slots.start(Step(5), b"five" * 20)
    path = tmp_path / "rank0.start1"
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0xFF
    path.write_bytes(raw)
    assert Slots(tmp_path / "rank0").left().starts == {4: b"four" * 20}


class Counter:
    def __init__(self) -> None:
        self.value = 0
        self.table = torch.zeros(LARGE_BYTES)

    def state_dict(self):
        return {"value": self.value, "table": self.table}

    def load_state_dict(self, state):
        self.value = state["value"]
        self.table.copy_(state["table"])


def registry_of(**objects) -> Registry:
    registry = Registry()
    registry.add(objects)
    return registry


def test_small_state_is_put_back(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    counter, mine = Counter(), Counter()
    registry = registry_of(model=model, optimizer=optimizer, scheduler=scheduler, counter=counter, mine=per_rank(mine))
    small = SmallState(registry, Slots(tmp_path / "rank0"), None)
    small.capture(Step(0))

    def draws():
        return torch.rand(3), random.random(), np.random.rand()

    before = draws()
    model(torch.randn(8, 4))
    optimizer.step()
    scheduler.step()
    counter.value, mine.value = 5, 6
    counter.table += 1
    small.publish(Step(0))
    small.restore()
    after = draws()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert model[1].num_batches_tracked == 0
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    assert (scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 1.0)
    assert (counter.value, mine.value, counter.table.sum()) == (0, 0, 0)
    left = Slots(tmp_path / "rank0").left()
    assert left.live is not None
    assert left.live[1] != left.starts[Step(0)]


def test_a_module_outside_every_optimizer_is_shared_state():
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    registry = registry_of(average=average, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(registry.modules) == ["model"]
    assert list(registry.shared) == ["average"]


def test_what_has_no_state_dict_is_refused():
    with pytest.raises(ValueError, match="has no state_dict"):
        registry_of(lamp=object())


def test_what_cannot_be_encoded_is_refused_by_name():
    class Odd:
        def state_dict(self):
            return {"inside": [object()]}

        def load_state_dict(self, state):
            pass

    with pytest.raises(ValueError, match="odd"):
        registry_of(odd=Odd())


def test_a_parameter_in_two_optimizers_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="two optimizers"):
        registry_of(
            model=model,
            first=torch.optim.SGD(model.parameters(), lr=1),
            second=torch.optim.SGD(model.parameters(), lr=1),
        )


class Wire:
    """Point-to-point messages between objects of one process, by source, destination and tag."""

    def __init__(self) -> None:
        self.messages: dict[tuple[int, int, int], torch.Tensor] = {}

    def of(self, rank: int):
        wire = self

        class Done:
            def __init__(self, call=lambda: None) -> None:
                self.wait = call

        class End:
            def send(self, tensors, dst, tag):
                wire.messages[rank, dst, tag] = tensors[0].clone()
                return Done()

            def recv(self, tensors, src, tag):
                return Done(lambda: tensors[0].copy_(wire.messages.pop((src, rank, tag))))

        return End()


@given(st.lists(st.integers(0, 70), max_size=12), st.integers(1, 4))
def test_tensors_arrive_whole_from_any_number_of_sources(sizes, sources):
    scale = transfer.PACK_BYTES // 40
    tensors = [torch.randint(0, 255, (size * scale,), dtype=torch.uint8) for size in sizes]
    tensors.append(torch.randn(3, 5).t())
    received = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    wire = Wire()
    for place in range(sources):
        transfer.send_share(wire.of(place), tensors, dst=9, place=place, sources=sources, tag=5)
    pending = transfer.receive(wire.of(9), received, sources=range(sources), tag=5)
    moved = transfer.finish(pending, received)
    assert moved == sum(tensor.nbytes for tensor in tensors)
    assert not wire.messages
    assert all(torch.equal(a, b) for a, b in zip(tensors, received, strict=True))


def test_shares_are_even():
    chunks = transfer.cut([100 << 20, 3, 50 << 20])
    owners = transfer.share(chunks, 3)
    loads = [sum(chunk.nbytes for chunk, who in zip(chunks, owners, strict=True) if who == k) for k in range(3)]
    assert max(loads) - min(loads) <= transfer.CHUNK_BYTES


@pytest.mark.parametrize(
    ("there", "committed", "refused", "gone"),
    [
        ([0, 5, 10], [0, 5, 10], [], [0]),
        ([0, 5, 10, 15], [0, 5], [], []),  # 10 and 15 are still being written by someone
        ([0, 5, 10, 15, 20], [0, 5], [10, 15], [10, 15]),  # a disk is full somewhere, this one must not become so
        ([0, 5, 10], [0, 5], [10], []),  # the last one serves for the loss of this rank
        ([0, 5, 10], [0, 10], [5], [5]),  # not everyone has 5: it is not the one to go back to if 10 is damaged
        ([5], [], [5], []),
        ([], [], [], []),
    ],
)
def test_which_checkpoints_are_kept(there, committed, refused, gone):
    assert checkpoint.superseded(there, committed, refused) == gone


@pytest.fixture
def written(tmp_path):
    """A writer of checkpoints whose place is a file at first, and what it told."""
    (tmp_path / "place").write_text("not a directory")
    told = []
    model = nn.Linear(3, 2)
    registry = Registry()
    registry.add({"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    writer = checkpoint.Writer(
        tmp_path / "place" / "rank0", registry, lambda step, nbytes, _: told.append((step, nbytes, writer.failure))
    )

    def save(step):
        writer.save(Step(step), checkpoint.Small(b"own", b"shared", [], []))
        assert writer.wait(10.0)
        return told[-1]

    return save


def test_a_checkpoint_that_cannot_be_written_is_named_and_the_next_one_is_tried(tmp_path, written):
    step, nbytes, failure = written(0)
    assert (step, nbytes) == (0, -1)
    assert "the checkpoint of step 0 could not be written: [Errno 20] Not a directory" in failure
    assert checkpoint.saved(tmp_path / "place" / "rank0") == []
    (tmp_path / "place").unlink()
    step, nbytes, failure = written(5)
    assert step == 5 and failure is None
    assert checkpoint.saved(tmp_path / "place" / "rank0") == [5]
    assert (tmp_path / "place" / "rank0" / "step-5.state").stat().st_size == nbytes
    assert checkpoint.read(tmp_path / "place" / "rank0", Step(5)).small.own == b"own"
