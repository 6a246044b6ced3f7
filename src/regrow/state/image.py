"""One rank's whole state as it lies outside of the process: an index in JSON, and raw parts with a checksum each.

Parts are the encoded small state, then the tensors of parameters, optimizer state and large shared objects, as they lie
in memory. Nothing is unpickled. Knows neither files nor where an image is kept: ``checkpoint`` puts it on storage, the
host's memory holds it between steps.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash

from regrow.ids import Step
from regrow.state import bundles
from regrow.state.registry import Registry

_FEW_BYTES = 16 << 20


class Damaged(RuntimeError):
    """An image is cut short or a checksum does not match; the message names it."""


@dataclass(frozen=True)
class Small:
    """The part of the state that is not parameters: encoded by ``SmallState``, and the layouts of DDP's buckets."""

    own: bytes
    shared: bytes
    large: list[torch.Tensor]
    layouts: list[Any]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def take(registry: Registry, step: Step, small: Small) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return an index without parts, and the live tensors that belong to it: to be copied before they change."""
    tensors = [tensor for param in registry.params for tensor in bundles.tensors_of(param)]
    tensors += small.large
    index: dict[str, Any] = {
        "step": step,
        "params": [bundles.describe(param) for param in registry.params],
        "tensors": [bundles.describe_tensor(tensor) for tensor in tensors],
        "large": len(small.large),
        "layouts": small.layouts,
    }
    return index, tensors


def checksum(part: Any) -> int:
    """Return a part's checksum."""
    return xxhash.xxh3_64_intdigest(part)


class Part(Protocol):
    """A part of an image, where it lies."""

    def __len__(self) -> int:
        """Return how many bytes it has."""

    def into(self, memory: memoryview) -> int:
        """Copy them, and return their checksum. May be called in any thread."""


@dataclass(frozen=True)
class Held:
    """A part that lies in this process's memory."""

    memory: memoryview

    def __len__(self) -> int:
        return len(self.memory)

    def into(self, memory: memoryview) -> int:
        """Copy it."""
        memory[:] = self.memory
        return checksum(memory)


@dataclass(frozen=True)
class Image:
    """A state that was read. Its parts still lie where they were found: install it soon."""

    step: Step
    name: str
    params: list[Any]
    parts: list[tuple[Part, int, int]]
    """Each with its size and the checksum that it must have."""
    small: Small

    def install(self, registry: Registry) -> None:
        """Make it the state of the parameters and their optimizers. The small state is the caller's.

        Raises:
            Damaged: some part does not match its checksum. What was there before is then overwritten in part: to check
                all of it beforehand would cost as much again.
        """
        incoming = [
            bundles.Incoming(param, entries, staged=False)
            for param, entries in zip(registry.params, self.params, strict=True)
        ]
        tensors = [tensor for each in incoming for tensor in each.tensors]
        pairs = sorted(zip(tensors, self.parts, strict=True), key=lambda pair: -pair[1][1])

        def fill(pair: tuple[torch.Tensor, tuple[Part, int, int]]) -> None:
            tensor, (part, size, expected) = pair
            _fill(tensor, part, size, expected, self.name)

        with ThreadPoolExecutor(_threads(sum(size for _, size, _ in self.parts)), "regrow-install") as threads:
            list(threads.map(fill, pairs))
        for each in incoming:
            each.install()


def _threads(size: int) -> int:
    """Return how many threads move so many bytes: one alone does not use all of memory's bandwidth."""
    return 1 if size < _FEW_BYTES else min(len(os.sched_getaffinity(0)), 4)


def _fill(tensor: torch.Tensor, part: Part, size: int, expected: int, name: str) -> None:
    """Write a part's bytes into a tensor; ``Damaged`` if they are not what they were."""
    if len(part) != size or size != tensor.nbytes:
        raise Damaged(f"{name} is damaged: a part has {len(part)} bytes, the index says {size}")
    if not size:
        return
    here = tensor.device.type == "cpu" and tensor.is_contiguous()
    memory = memory_of(tensor) if here else memoryview(bytearray(size))
    if part.into(memory) != expected:
        raise Damaged(f"{name} is damaged: part of {size} bytes does not match its checksum")
    if not here:
        with torch.no_grad():
            tensor.copy_(torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape))


def check(index: dict[str, Any], parts: Sequence[memoryview], name: str) -> None:
    """Check every part against the index; ``Damaged`` says what is wrong with ``name``."""
    for number, ((size, expected), part) in enumerate(zip(index["parts"], parts, strict=True)):
        if len(part) != size or checksum(part) != expected:
            raise Damaged(f"{name} is damaged: part {number} does not match its checksum")


def assemble(index: dict[str, Any], parts: Sequence[Part], name: str) -> Image:
    """Return the image; only its small parts are checked yet, and ``Damaged`` says what is wrong with ``name``."""
    rows = [(part, int(size), int(expected)) for part, (size, expected) in zip(parts, index["parts"], strict=True)]
    own, shared, *rest = rows
    split = len(rest) - index["large"]
    large = []
    for description, row in zip(index["tensors"][split:], rest[split:], strict=True):
        large.append(bundles.allocate(description, torch.device("cpu")))
        _fill(large[-1], *row, name)
    small = Small(_bytes(*own, name), _bytes(*shared, name), large, index["layouts"])
    return Image(Step(index["step"]), name, index["params"], rest[:split], small)


def _bytes(part: Part, size: int, expected: int, name: str) -> bytes:
    raw = bytearray(size)
    if len(part) != size or part.into(memoryview(raw)) != expected:
        raise Damaged(f"{name} is damaged: part of {size} bytes does not match its checksum")
    return bytes(raw)
