"""Copy a rank's state, as it is now, into a buffer in its host's memory; and how large that will be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from regrow.ids import Step
from regrow.peer.memory import Buffer, Layout
from regrow.state import image, shards
from regrow.state.registry import Registry


def write(
    buffer: Buffer,
    registry: Registry,
    step: Step,
    small: image.Small,
    facts: dict[str, Any],
    between: Callable[[int, int], None] = lambda number, count: None,
) -> Layout:
    """Take a snapshot; the state must not change meanwhile. ``facts`` go into its index.

    ``between(number, count)`` is called before each part, and may call it all off by raising: then nothing is there.
    """
    index, tensors = image.take(registry, step, small)
    sources: list[torch.Tensor | memoryview] = [memoryview(small.own), memoryview(small.shared), *tensors]
    layout = Layout.of([source.nbytes for source in sources])
    places = buffer.open(layout)
    sums = []
    for number, (place, source) in enumerate(zip(places, sources, strict=True)):
        between(number, len(places))
        if len(place):
            torch.frombuffer(place, dtype=torch.uint8).copy_(_bytes_of(source))
        sums.append([len(place), image.checksum(place)])
    buffer.seal(layout, {**index, **facts, "parts": sums})
    return layout


def expected_bytes(registry: Registry) -> int:
    """Return how large this rank's state will be once every optimizer has made its first step."""
    total = 0
    tensors = {id(optimizer): shards.state_tensors(optimizer) for optimizer in registry.optimizers.values()}
    for param in registry.params:
        owned = param.optimizer is not None and shards.owns(param.optimizer, param.tensor)
        total += shards.local(param.tensor).nbytes * (1 + (tensors[id(param.optimizer)] if owned else 0))
    return max(total, registry.state_bytes())


def _bytes_of(source: torch.Tensor | memoryview) -> torch.Tensor:
    if isinstance(source, torch.Tensor):
        return source.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return torch.frombuffer(bytearray(source), dtype=torch.uint8)
