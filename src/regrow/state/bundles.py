"""Describe and hold the tensors of parameters with their optimizer state, so that another rank can receive them.

A *bundle* is one parameter and its optimizer state. Its description is JSON (no tensor data); its tensors are listed
in the same order on both sides.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import torch

from regrow.state import codec, shards
from regrow.state.registry import Param

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def describe_tensor(tensor: torch.Tensor) -> list[Any]:
    """Return ``[dtype, shape]``."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def dtype_of(description: list[Any]) -> torch.dtype:
    """Return the type of a tensor of that description."""
    return _DTYPES[description[0]]


def allocate(description: list[Any], device: torch.device) -> torch.Tensor:
    """Return an uninitialised tensor of that description."""
    return torch.empty(description[1], dtype=_DTYPES[description[0]], device=device)


def describe(param: Param) -> list[list[Any]]:
    """Return the optimizer state: ``[key, kind, dtype, shape, on_cpu]`` or ``[key, "value", encoded]`` each.

    The kind is ``tensor``, or ``shard``: of a tensor that is sharded as its parameter is, this rank's part.
    """
    entries: list[list[Any]] = []
    if param.optimizer is None or param.tensor not in shards.state_of(param.optimizer):
        return entries
    for key, value in shards.state_of(param.optimizer)[param.tensor].items():
        if isinstance(value, torch.Tensor):
            kind = "shard" if shards.is_sharded(value) else "tensor"
            entries.append([key, kind, *describe_tensor(shards.local(value)), value.device.type == "cpu"])
        else:
            entries.append([key, "value", base64.b64encode(codec.encode(value)).decode()])
    return entries


def unpacked(text: str) -> bytes:
    """Return the encoded form of a value that ``describe`` has packed into JSON."""
    return base64.b64decode(text)


def tensors_of(param: Param) -> list[torch.Tensor]:
    """Return the parameter and its state tensors, in the order of ``describe``."""
    tensors = [shards.local(param.tensor)]
    if param.optimizer is not None and param.tensor in shards.state_of(param.optimizer):
        values = shards.state_of(param.optimizer)[param.tensor].values()
        tensors += [shards.local(value) for value in values if isinstance(value, torch.Tensor)]
    return tensors


class Incoming:
    """Memory for a bundle that is on its way.

    In place (a replacement, which has nothing to lose) the parameter's own memory is written. Staged (a survivor
    whose old values may be needed should the sender die) all goes to fresh memory until ``install``.
    """

    def __init__(self, param: Param, entries: list[list[Any]], *, staged: bool) -> None:
        self.param = param
        self._staged = staged
        own = shards.local(param.tensor)
        in_place = not staged and own.is_contiguous()
        self.tensors = [own if in_place else torch.empty_like(own, memory_format=torch.contiguous_format)]
        self._state: dict[Any, Any] = {}
        old = {} if param.optimizer is None else shards.state_of(param.optimizer).get(param.tensor, {})
        for key, kind, *rest in entries:
            if kind == "value":
                self._state[key] = codec.decode(unpacked(rest[0]))
                continue
            device = torch.device("cpu") if rest[2] else param.tensor.device
            reuse = old.get(key)
            if not staged and isinstance(reuse, torch.Tensor) and describe_tensor(shards.local(reuse)) == rest[:2]:
                self._state[key] = reuse
                part = shards.local(reuse)
            else:
                part = allocate(rest[:2], device)
                self._state[key] = shards.like(param.tensor, part) if kind == "shard" else part
            self.tensors.append(part)

    def install(self) -> None:
        """Make what has arrived the parameter's state."""
        own = shards.local(self.param.tensor)
        if self.tensors[0] is not own and self.tensors[0].data_ptr() != own.data_ptr():
            own.copy_(self.tensors[0])
        if self.param.optimizer is None:
            return
        state = shards.state_of(self.param.optimizer)
        if self._state:
            state[self.param.tensor] = self._state
        else:
            state.pop(self.param.tensor, None)


def describe_all(params: Iterable[Param]) -> list[list[list[Any]]]:
    """Return ``describe`` of each."""
    return [describe(param) for param in params]
