"""One rank's whole state as it lies outside of the process: an index in JSON, and raw parts with a checksum each.

Parts are the encoded small state, then the tensors of parameters, optimizer state and large shared objects, as they lie
in memory. Nothing is unpickled. Knows neither files nor where an image is kept: ``checkpoint`` puts it on storage, the
host's memory holds it between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from regrow.ids import Step
from regrow.state import bundles
from regrow.state.registry import Registry


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


@dataclass(frozen=True)
class Image:
    """A state that was read and found whole. Its parts still lie where they were read from: install it soon."""

    step: Step
    params: list[Any]
    parts: list[memoryview]
    small: Small

    def install(self, registry: Registry) -> None:
        """Make it the state of the parameters and their optimizers. The small state is the caller's."""
        parts = iter(self.parts)
        for param, entries in zip(registry.params, self.params, strict=True):
            incoming = bundles.Incoming(param, entries, staged=False)
            for tensor in incoming.tensors:
                _fill(tensor, next(parts))
            incoming.install()


def _fill(tensor: torch.Tensor, part: memoryview) -> None:
    """Write a part's bytes into a tensor; they may begin anywhere, so they are not looked at as its type."""
    if not len(part):
        return
    raw = torch.frombuffer(part, dtype=torch.uint8)
    with torch.no_grad():
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            tensor.detach().reshape(-1).view(torch.uint8).copy_(raw)
        else:
            tensor.copy_(raw.clone().view(tensor.dtype).reshape(tensor.shape))


def assemble(index: dict[str, Any], parts: Sequence[memoryview], name: str) -> Image:
    """Check every part against the index, and return the image; ``Damaged`` says what is wrong with ``name``."""
    for number, ((size, expected), part) in enumerate(zip(index["parts"], parts, strict=True)):
        if len(part) != size or checksum(part) != expected:
            raise Damaged(f"{name} is damaged: part {number} does not match its checksum")
    own, shared, *rest = parts
    split = len(rest) - index["large"]
    large = []
    for description, part in zip(index["tensors"][split:], rest[split:], strict=True):
        large.append(bundles.allocate(description, torch.device("cpu")))
        _fill(large[-1], part)
    small = Small(bytes(own), bytes(shared), large, index["layouts"])
    return Image(Step(index["step"]), index["params"], rest[:split], small)
