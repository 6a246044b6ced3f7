"""Where the numbers of a parameter lie: real local views, flat views, chunks, and memory that is used again.

Nothing here knows about optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 131072
"""Elements per thread and slice.

A dozen such tensors stay in cache, and the cost of a call is small beside their work.
"""

BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.float16: torch.int16, torch.bfloat16: torch.int16}
"""The integer type through which the bits of a float type are read; its keys are the types that can be taken back."""

WORKING = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Types whose inverse is computed in a wider one.

Rounding every operation to 8 bits would lose more than the step did.
"""


def plain(tensor: Tensor) -> Tensor:
    """Return the memory behind a parameter or state tensor.

    This rank's shard of a DTensor, a complex number as two real ones.
    """
    if tensor.is_sparse:
        return tensor  # a detached one would not share what is written
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def empty_like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return ``memory`` (one-dimensional, as long as ``tensor``) with the shape of ``tensor``, and with its strides if
    it has no gaps.
    """
    if _dense(tensor):
        return memory.as_strided(tensor.shape, tensor.stride())
    return memory.view(tensor.shape)


def flatten(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Return one-dimensional views in which equal positions are equal elements, or None if memory layouts differ."""
    first = tensors[0]
    if all(t.is_contiguous() for t in tensors):
        return [t.view(-1) for t in tensors]
    if all(t.stride() == first.stride() for t in tensors) and _dense(first):
        return [t.as_strided((t.numel(),), (1,)) for t in tensors]
    return None


def chunk_elements(tensor: Tensor, threads: int) -> int:
    """Return the slice length for a tensor: short on a CPU, everything at once where a call is a kernel launch."""
    return CHUNK * threads if tensor.device.type == "cpu" else max(tensor.numel(), 1)


class Pool:
    """Memory that is handed out, given back, and kept for the next step: fresh pages cost six times what the copy into
    them does.

    Not thread-safe. Holds on to at most ``limit_bytes`` of what was given back.
    """

    def __init__(self, limit_bytes: int = 256 << 20) -> None:
        self._limit = limit_bytes
        self._idle: dict[tuple[torch.device, int], list[Tensor]] = {}
        self.idle_bytes = 0
        self.lent_bytes = 0

    def take(self, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised contiguous tensor on the device of ``like``."""
        count = 1
        for size in shape:
            count *= size
        need = count * dtype.itemsize
        idle = self._idle.get((like.device, need))
        if idle:
            raw = idle.pop()
            self.idle_bytes -= need
        else:
            raw = torch.empty(need, dtype=torch.uint8, device=like.device)
        self.lent_bytes += need
        return raw.view(dtype).view(shape)

    def give(self, tensor: Tensor) -> None:
        """Take back what `take` returned; the caller must not use it any more."""
        raw = tensor.view(-1).view(torch.uint8)
        need = raw.numel()
        self.lent_bytes -= need
        if self.idle_bytes + need <= self._limit:
            self._idle.setdefault((raw.device, need), []).append(raw)
            self.idle_bytes += need
