"""A checkpoint that is being read: brings a rank's part of it into place, also if there are other ranks than then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from regrow.disk import content, marks
from regrow.disk.content import Names, Where
from regrow.disk.dcp import Reader
from regrow.disk.marks import Found
from regrow.disk.storage import Storage
from regrow.ids import Step
from regrow.state import bundles, codec, shards
from regrow.state.image import Damaged, Small
from regrow.state.registry import Param, Registry


class Misfit(ValueError):
    """The checkpoint is whole, but of another model."""


@dataclass(frozen=True)
class Saved:
    """What a rank takes from a checkpoint: ``small`` is here, the rest is read when it is installed."""

    step: Step
    world: int
    """How many ranks there were."""
    small: Small
    _reader: Reader
    _names: Names
    _where: Where
    _entries: list[list[list[Any]]]
    title: str
    """What to call it."""

    def install(self, registry: Registry) -> None:
        """Make it the state of the parameters and their optimizers. The small state is the caller's.

        Raises:
            Misfit: it is another model's. Nothing is changed then.
            Damaged: it cannot be read. What was there before is then overwritten in part.
        """
        targets = {self._names.param(param.index): param.tensor.detach() for param in registry.params}
        states = [(param, self._state(param)) for param in registry.params]
        for _, (prefix, values) in states:
            targets |= {f"{prefix}{key}": value for key, value in values.items() if isinstance(value, torch.Tensor)}
        self._check(targets)
        try:
            self._reader.load(targets)
        except Exception as error:  # whatever DCP makes of a file that is not what it was
            raise Damaged(f"{self.title} cannot be read: {type(error).__name__}: {error}") from error
        for param, (_, values) in states:
            if param.optimizer is None:
                continue
            if values:
                shards.state_of(param.optimizer)[param.tensor] = values
            else:
                shards.state_of(param.optimizer).pop(param.tensor, None)

    def _state(self, param: Param) -> tuple[str, dict[str, Any]]:
        """Return the name of a parameter's optimizer state, and memory for what this rank is to have of it."""
        if param.optimizer is None or not shards.owns(param.optimizer, param.tensor):
            return "", {}
        name = self._names.optimizer(param)
        prefix = f"{self._where.prefix}{name}.state.{self._names.in_optimizer(param.index)}."
        values: dict[str, Any] = {}
        for key, kind, *rest in self._entries[param.index] or self._described(prefix, param):
            if kind == "value":
                values[key] = codec.decode(bundles.unpacked(rest[0]))
                continue
            device = torch.device("cpu") if rest[2] else param.tensor.device
            if kind == "shard":
                part = torch.empty_like(shards.local(param.tensor), dtype=bundles.dtype_of(rest), device=device)
                values[key] = shards.like(param.tensor, part)
            else:
                values[key] = bundles.allocate(rest[:2], device)
        return prefix, values

    def _described(self, prefix: str, param: Param) -> list[list[Any]]:
        """Return what another rank had of a parameter that is this one's now."""
        rows = []
        for name in self._reader.below(prefix):
            found = self._reader.tensor(name)
            if found is None:
                raise Misfit(f"{self.title}: {name} cannot be taken over from another rank")
            whole = shards.is_sharded(param.tensor) and tuple(found.size) == tuple(param.tensor.shape)
            dtype = str(found.properties.dtype).removeprefix("torch.")
            small = not found.size and param.tensor.dim() > 0  # a counter
            rows.append([name[len(prefix) :], "shard" if whole else "tensor", dtype, list(found.size), small])
        return rows

    def _check(self, targets: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in targets.items():
            found = self._reader.tensor(name)
            if found is None:
                raise Misfit(f"{self.title} has no {name}: it is of another model; give another --ckpt-dir")
            if tuple(found.size) != tuple(tensor.shape):
                raise Misfit(
                    f"{self.title} is of another model: {name} is {list(found.size)} there and {list(tensor.shape)} "
                    "here; give another --ckpt-dir"
                )


def open_saved(
    storage: Storage, found: Found, registry: Registry, names: Names, where: Where, *, donor: int | None = None
) -> Saved:
    """Open a complete checkpoint. ``donor``: the rank whose own state is taken, if not this one's.

    Raises:
        Damaged: it cannot be read.
        Misfit: it is of another model.
    """
    title = f"the checkpoint of step {found.step} in {storage}"
    wrong = marks.damage(storage, found, [marks.METADATA])
    if wrong:
        raise Damaged(f"{title}: {wrong[0]}")
    try:
        reader = Reader(storage, found.name)
        shared = reader.raw(where.shared)
        own = codec.decode(reader.raw(where.own(where.rank if donor is None else donor)))
        objects = codec.decode(shared)["objects"]
        places = content.places(objects, where.prefix)
        large = {}
        for _, name in sorted(places.items()):
            known = reader.tensor(name)
            assert known is not None
            large[name] = torch.empty(known.size, dtype=known.properties.dtype)
        reader.load(large)
    except KeyError as error:
        raise Misfit(f"{title} has no {error.args[0]}: it is of another kind of job; give another --ckpt-dir") from None
    except Exception as error:
        raise Damaged(f"{title} cannot be read: {type(error).__name__}: {error}") from error
    if len(own["params"]) != len(registry.params):
        raise Misfit(
            f"{title} is of another model: {len(own['params'])} parameters there, {len(registry.params)} here; "
            "give another --ckpt-dir"
        )
    small = Small(own["own"], shared, list(large.values()), own["layouts"])
    return Saved(found.step, found.world, small, reader, names, where, own["params"], title)
