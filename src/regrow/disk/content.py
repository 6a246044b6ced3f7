"""What is in a checkpoint, under which names: those that stock PyTorch uses for the same things.

    model.<name of a parameter or buffer>                as ``get_model_state_dict`` names them: without ``module.``
    optimizer.state.<parameter>.<key>                    as ``get_optimizer_state_dict`` does
    optimizer.param_groups...
    <other objects>...                                   what their ``state_dict`` gave
    regrow.shared, regrow.rank.<r>                       what regrow needs to go on bit by bit, as bytes

The first word is the name that was given to ``protect``; in a pipeline ``stage<n>.`` comes before it. Small state is
what was captured at the step's start; parameters and optimizer state are the live tensors, to be copied before they
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from regrow.state import bundles, codec, shards
from regrow.state.image import Small
from regrow.state.registry import Param, Registry
from regrow.state.small import PLACE, lower

_TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module")
"""Wrappers that stock PyTorch leaves out of names as well."""


@dataclass(frozen=True)
class Where:
    """Which rank's state this is, and who else writes to the same storage."""

    rank: int
    stage: int | None
    replicas: tuple[int, ...]
    """Ranks that have the same of whatever is not sharded, this one included."""
    together: tuple[int, ...]
    """Ranks that share this storage, this one included."""

    @property
    def prefix(self) -> str:
        """What comes before all names."""
        return "" if self.stage is None else f"stage{self.stage}."

    @property
    def shared(self) -> str:
        """The name of what all replicas have in common."""
        return f"regrow.{self.prefix}shared"

    @staticmethod
    def own(rank: int) -> str:
        """The name of what is a rank's own."""
        return f"regrow.rank.{rank}"


def named_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with the names that their parameters have in stock checkpoints."""
    if isinstance(module, DistributedDataParallel):
        yield from named_modules(module.module, prefix)
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from named_modules(child, prefix if name in _TRANSPARENT else f"{prefix}{name}.")


class Names:
    """The names of a registry's parameters and buffers. Made once: modules do not change while they train."""

    def __init__(self, registry: Registry, prefix: str) -> None:
        self.params: dict[int, str] = {}
        """By index: the name of each parameter in its module."""
        self.homes: dict[int, str] = {}
        """By index: the name that its module was protected by."""
        self.buffers: dict[str, str] = {}
        """By the registry's name: the whole name of each buffer that is a part of its module's state."""
        for home, module in registry.modules.items():
            for place, part in named_modules(module):
                for name, tensor in part.named_parameters(recurse=False):
                    param = registry.param_of(tensor)
                    if param is not None and param.index not in self.params:
                        self.params[param.index], self.homes[param.index] = f"{place}{name}", home
            wanted = {id(b): f"{prefix}{home}.{p}{n}" for p, part in named_modules(module) for n, b in _lasting(part)}
            for key, buffer in module.named_buffers():
                if id(buffer) in wanted:
                    self.buffers[f"{home}.{key}"] = wanted[id(buffer)]
        for param in registry.params:
            self.params.setdefault(param.index, param.name)
        self._optimizers = {id(optimizer): name for name, optimizer in registry.optimizers.items()}
        self._prefix = prefix
        self._several = len(registry.modules) > 1

    def param(self, index: int) -> str:
        """Return the whole name of a parameter."""
        home = self.homes.get(index)
        return (
            f"{self._prefix}{home}.{self.params[index]}" if home is not None else f"{self._prefix}{self.params[index]}"
        )

    def optimizer(self, param: Param) -> str:
        """Return the name of the optimizer that updates a parameter."""
        return self._optimizers[id(param.optimizer)]

    def in_optimizer(self, index: int) -> str:
        """Return the name that a parameter has in its optimizer's state: its module's only if there are several."""
        return (
            f"{self.homes[index]}.{self.params[index]}" if self._several and index in self.homes else self.params[index]
        )


def _lasting(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in module.named_buffers(recurse=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def content(registry: Registry, names: Names, small: Small, where: Where) -> dict[str, Any]:
    """Return the state of this rank, nested as stock PyTorch nests it."""
    shared = codec.decode(small.shared)
    own = codec.decode(small.own)
    others = codec.decode(own["others"]) if own["others"] else {}
    nested: dict[str, Any] = {}
    for param in registry.params:
        home = names.homes.get(param.index)  # a tensor that only an optimizer knows is in no module
        target = nested if home is None else nested.setdefault(home, {})
        target[names.params[param.index]] = param.tensor.detach()
    for key, name in names.buffers.items():
        home = key.partition(".")[0]
        nested.setdefault(home, {})[name.removeprefix(f"{where.prefix}{home}.")] = others["buffers"][key]
    for name, optimizer in registry.optimizers.items():
        nested[name] = _optimizer(registry, names, optimizer, shared["groups"][name])
    for name, skeleton in shared["objects"].items():
        nested[name] = lower(skeleton, small.large)
    ours = codec.encode({"own": small.own, "layouts": small.layouts, "params": bundles.describe_all(registry.params)})
    return {
        **(nested if where.stage is None else {f"stage{where.stage}": nested}),
        where.shared: as_tensor(small.shared),
        where.own(where.rank): as_tensor(ours),
    }


def _optimizer(
    registry: Registry, names: Names, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    state = {}
    for param in registry.of_optimizer(optimizer):
        if values := shards.state_of(optimizer).get(param.tensor):
            state[names.in_optimizer(param.index)] = dict(values)
    rows = []
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        members = [registry.param_of(tensor) for tensor in group["params"]]
        rows.append({**settings, "params": [names.in_optimizer(m.index) for m in members if m is not None]})
    return {"state": state, "param_groups": rows}


def as_tensor(raw: bytes) -> torch.Tensor:
    """Return bytes as a tensor, so that nothing has to be unpickled to read them."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def places(objects: Mapping[str, Any], prefix: str) -> dict[int, str]:
    """Return the names of the large tensors of shared objects, by the number that each has there."""
    found: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, tuple) and len(value) == 2 and value[0] == PLACE:
            found[value[1]] = name
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(item, f"{name}.{number}")

    for key, item in objects.items():
        walk(item, f"{prefix}{key}")
    return found


# who writes what -----------------------------------------------------------------------------------------------------


def holders(name: str, value: Any, where: Where, alone: frozenset[str]) -> tuple[int, ...]:
    """Return the ranks on this storage that have the same under this name. ``alone``: below what only this one has."""
    if name == where.own(where.rank) or name.rpartition(".")[0] in alone:
        return (where.rank,)
    ranks = where.replicas
    if isinstance(value, torch.Tensor) and shards.is_sharded(value):
        sharded: Any = value
        at, mesh = sharded.device_mesh.get_coordinate(), sharded.device_mesh.mesh
        index = tuple(slice(None) if p.is_replicate() else at[d] for d, p in enumerate(sharded.placements))
        ranks = tuple(int(rank) for rank in mesh[index].flatten().tolist())
    return tuple(sorted({*ranks} & {*where.together}))


def alone(registry: Registry, names: Names, prefix: str) -> frozenset[str]:
    """Return the names of which no replica has anything: the state of an optimizer that is sharded by parameters."""
    return frozenset(
        f"{prefix}{name}.state.{names.in_optimizer(param.index)}"
        for name, optimizer in registry.optimizers.items()
        if shards.is_zero(optimizer)
        for param in registry.of_optimizer(optimizer)
    )


def assign(sizes: Mapping[tuple[str, tuple[int, ...]], int]) -> dict[str, int]:
    """Say who writes each of (name, holders), of these sizes: as much each, as far as it goes.

    All holders of the same things come to the same answer without asking each other.
    """
    load: dict[tuple[int, ...], dict[int, int]] = {}
    chosen: dict[str, int] = {}
    for (name, ranks), size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        loads = load.setdefault(ranks, dict.fromkeys(ranks, 0))
        writer = min(ranks, key=lambda rank: (loads[rank], rank))
        loads[writer] += max(size, 1)
        chosen[name] = writer
    return chosen
