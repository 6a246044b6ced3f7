"""What the user protects, sorted by how it is kept.

* **Parameters** with their optimizer state: large, replicated, never copied; each has a version.
* **Shared objects** (schedulers, scalers, moving averages, the optimizers' hyperparameters): the same on every rank,
  captured at each step's start.
* **Own state** (random numbers, buffers, the data's cursor, objects marked ``per_rank``): different on every rank,
  captured at each step's start and again before collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from regrow.plan import Indices
from regrow.state import codec, shards


@runtime_checkable
class Stateful(Protocol):
    """Anything that can say its state and take it back."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take the state back."""
        ...


@dataclass(frozen=True)
class PerRank:
    """Marks an object whose state differs from rank to rank (see ``regrow.per_rank``)."""

    value: Stateful


def per_rank(value: Stateful) -> PerRank:
    """Mark a protected object as different on every rank, such as a metric over the rank's own samples."""
    return PerRank(value)


@dataclass(eq=False)
class Param:
    """One parameter and the optimizer that updates it, if any."""

    index: int
    name: str
    tensor: torch.Tensor
    optimizer: torch.optim.Optimizer | None = None


@dataclass
class Registry:
    """Everything that was given to ``protect``."""

    params: list[Param] = field(default_factory=list)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    shared: dict[str, Stateful] = field(default_factory=dict)
    own: dict[str, Stateful] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _by_id: dict[int, Param] = field(default_factory=dict)

    def add(self, objects: dict[str, Any]) -> None:
        """Sort the objects in.

        Optimizers go first, so that a module without a parameter in any of them (a moving average) is seen as such.
        """
        taken = {*self.modules, *self.optimizers, *self.shared, *self.own} & {*objects}
        if taken:
            raise ValueError(f"protect() was given {sorted(taken)} before: protect each object once")
        self.optimizers |= {name: value for name, value in objects.items() if isinstance(value, torch.optim.Optimizer)}
        trained = {id(p) for opt in self.optimizers.values() for group in opt.param_groups for p in group["params"]}
        for name, value in objects.items():
            if isinstance(value, torch.optim.Optimizer):
                continue
            if isinstance(value, nn.Module) and any(id(p) in trained for p in value.parameters()):
                self.modules[name] = value
            elif isinstance(value, PerRank):
                self.own[name] = _stateful(name, value.value)
            else:
                self.shared[name] = _stateful(name, value)
        self._collect()

    def _collect(self) -> None:
        self.params.clear()
        self._by_id.clear()
        self.buffers = {
            f"{name}.{key}": buffer for name, module in self.modules.items() for key, buffer in module.named_buffers()
        }
        for name, module in self.modules.items():
            for key, param in module.named_parameters():
                self._take(f"{name}.{key}", param, None)
        for name, optimizer in self.optimizers.items():
            for g, group in enumerate(optimizer.param_groups):
                for i, param in enumerate(group["params"]):
                    self._take(f"{name}.{g}.{i}", param, optimizer)

    def _take(self, name: str, tensor: torch.Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        known = self._by_id.get(id(tensor))
        if known is None:
            known = self._by_id[id(tensor)] = Param(len(self.params), name, tensor)
            self.params.append(known)
        if optimizer is not None:
            if known.optimizer is not None and known.optimizer is not optimizer:
                raise ValueError(
                    f"parameter {known.name} is in two optimizers: regrow cannot say which update is its own"
                )
            known.optimizer = optimizer

    def param_of(self, tensor: torch.Tensor) -> Param | None:
        """Return the entry of a parameter tensor."""
        return self._by_id.get(id(tensor))

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[Param]:
        """Yield the parameters that an optimizer updates."""
        return (param for param in self.params if param.optimizer is optimizer)

    def layout(self) -> str:
        """Return a digest of what the parameters are; ranks that differ in it are not replicas."""
        digest = hashlib.sha256()
        for param in self.params:
            optimizer = type(param.optimizer).__name__ if param.optimizer is not None else "-"
            line = f"{param.name} {tuple(param.tensor.shape)} {param.tensor.dtype} {optimizer}\n"
            digest.update(line.encode())
        return digest.hexdigest()[:12]

    def everything(self) -> Indices:
        """Return the indices of all parameters."""
        return Indices.span(len(self.params))

    def state_bytes(self) -> int:
        """Return the size of parameters and optimizer state."""
        total = 0
        for param in self.params:
            total += shards.local(param.tensor).nbytes
            if param.optimizer is not None:
                values = shards.state_of(param.optimizer).get(param.tensor, {}).values()
                total += sum(shards.local(value).nbytes for value in values if isinstance(value, torch.Tensor))
        return total

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts of the parameters."""
        return any(shards.is_sharded(param.tensor) or shards.is_zero(param.optimizer) for param in self.params)

    def place(self) -> str:
        """Return a name for the parts that this rank holds: ranks of the same name are replicas of each other."""
        return shards.place((param.tensor for param in self.params), self.optimizers.values())

    def checksum(self) -> int:
        """Return a sum over the parameters' memory, to tell replicas from ranks that train something else. Quick."""
        total = 0
        for param in self.params:
            raw = shards.local(param.tensor).reshape(-1).view(torch.uint8)
            whole = raw.numel() // 8 * 8
            total = total * 31 + int(raw[:whole].view(torch.int64).sum()) + int(raw[whole:].sum())
        return total & ((1 << 64) - 1)

    def hyperparameters(self) -> dict[str, list[dict[str, Any]]]:
        """Return each optimizer's param groups without their parameters (a scheduler moves the learning rate there)."""
        return {
            name: [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for name, optimizer in self.optimizers.items()
        }

    def set_hyperparameters(self, values: dict[str, list[dict[str, Any]]]) -> None:
        """Put back what ``hyperparameters`` gave."""
        for name, groups in values.items():
            for group, saved in zip(self.optimizers[name].param_groups, groups, strict=True):
                for key, value in saved.items():
                    current = group.get(key)
                    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
                        current.copy_(value)  # a tensor learning rate may be shared with a captured graph
                    else:
                        group[key] = value


def _stateful(name: str, value: Any) -> Stateful:
    if not isinstance(value, Stateful):
        raise ValueError(
            f"protect({name}=...): a {type(value).__name__} has no state_dict/load_state_dict; give it both, "
            "or leave it out if it never changes"
        )
    codec.check(value.state_dict(), f"protect({name}=...).state_dict()")
    return value
