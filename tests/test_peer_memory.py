"""Snapshots in shared memory: whole or not there, and never taken when damaged."""

from __future__ import annotations

import contextlib
import subprocess

import pytest
import torch
from torch import nn

from regrow.ids import Step
from regrow.peer.memory import Buffer, Damaged, Layout, NoRoom, Shelf
from regrow.state import image
from regrow.state.registry import Registry


def registry_of(value: float) -> Registry:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((2, 7), value)).sum().backward()
    optimizer.step()
    registry = Registry()
    registry.add({"model": model, "optimizer": optimizer})
    return registry


def put(buffer: Buffer, registry: Registry, step: int) -> None:
    small = image.Small(b"own", b"shared", [torch.arange(3.0)], [])
    index, tensors = image.take(registry, Step(step), small)
    parts = [memoryview(small.own), memoryview(small.shared), *map(image.memory_of, tensors)]
    layout = Layout.of([len(part) for part in parts])
    for place, part in zip(buffer.open(layout), parts, strict=True):
        place[:] = part
    buffer.seal(layout, {**index, "parts": [[len(part), image.checksum(part)] for part in parts]})


def values(registry: Registry) -> list[torch.Tensor]:
    found = []
    for param in registry.params:
        found += [param.tensor.detach().clone(), *(v.clone() for v in param.optimizer.state[param.tensor].values())]
    return found


def test_what_was_put_there_comes_back(tmp_path):
    first, other = registry_of(1.0), registry_of(2.0)
    put(Buffer(tmp_path / "a"), first, 3)
    found = image.assemble(*Buffer(tmp_path / "a").read("it"), "it")  # another process would do the same
    assert found.step == 3 and found.small.own == b"own" and found.small.shared == b"shared"
    assert torch.equal(found.small.large[0], torch.arange(3.0))
    assert not all(map(torch.equal, values(first), values(other)))
    found.install(other)
    assert all(map(torch.equal, values(first), values(other)))


def test_a_snapshot_is_not_there_before_it_is_sealed(tmp_path):
    shelf, registry = Shelf(tmp_path / "rank0"), registry_of(1.0)
    put(shelf.next(Step(1)), registry, 1)
    put(shelf.next(Step(2)), registry, 2)
    assert sorted(shelf.whole()) == [1, 2]
    shelf.next(Step(3)).open(Layout.of([10]))  # a kill in here leaves the other
    assert sorted(Shelf(tmp_path / "rank0").whole()) == [2]
    put(shelf.next(Step(3)), registry, 3)
    assert sorted(shelf.whole()) == [2, 3]
    put(shelf.next(Step(3)), registry, 3)  # again: not at the cost of the one before
    assert sorted(shelf.whole()) == [2, 3]
    shelf.drop_unless(lambda head: head.step <= 2)
    assert sorted(shelf.whole()) == [2]


@pytest.mark.parametrize("where", ["head", "part", "index"])
def test_a_flipped_bit_is_found(tmp_path, where):
    path = tmp_path / "a"
    put(Buffer(path), registry_of(1.0), 3)
    raw = bytearray(path.read_bytes())
    at = {"head": 9, "part": 4096 + 64 + 64 + 5, "index": raw.index(b'"step"') + 1}[where]
    raw[at] ^= 4
    path.write_bytes(raw)
    with pytest.raises((image.Damaged, Damaged), match="the snapshot"):
        image.assemble(*Buffer(path).read("the snapshot"), "the snapshot").install(registry_of(2.0))


def test_a_shelf_can_grow(tmp_path):
    """Optimizer state comes with the first update."""
    buffer = Buffer(tmp_path / "a")
    put(buffer, registry_of(1.0), 1)
    for place in buffer.open(Layout.of([1 << 20, 3])):
        place[:] = b"x" * len(place)
    assert buffer.step() is None
    put(buffer, registry_of(1.0), 2)
    assert buffer.read("it")[0]["step"] == 2


def test_no_room(tmp_path):
    """A page that cannot be had would end the process with SIGBUS; it is asked for beforehand."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        with pytest.raises(NoRoom, match=r"needs \d+ MB of shared memory, and there are \d+ MB left"):
            Buffer(tmp_path / "a").open(Layout.of([4 << 20]))
        put(Buffer(tmp_path / "a"), registry_of(1.0), 1)
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["umount", "-l", str(tmp_path)], check=False)
