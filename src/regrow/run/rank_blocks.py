"""A rank's part of the state as blocks: rows of its parameters, with all that the optimizers keep for them.

Of a sharded parameter it is this rank's shard. Small parameters are one block each, large ones are cut into groups of
rows, so that a fraction of all blocks is about that fraction of the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from regrow.iterative.arrays import Array
from regrow.iterative.record import Record
from regrow.state import bundles, shards
from regrow.state.registry import Param, Registry

_CUTS = 64
"""No block is larger than about this part of all parameters."""
_LEAST_BYTES = 1 << 12
"""Smaller pieces are not worth their bookkeeping."""
_LARGE = "shared tensor "


class _Piece(NamedTuple):
    param: Param
    rows: slice | None

    def of(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return the rows of a tensor that is as long as the parameter; of another one, all of it."""
        return tensor if self.rows is None or tensor.shape != like.shape else tensor[self.rows]


class RankBlocks:
    """The blocks of one rank. ``large``: the large tensors of objects that ranks share, which may die with it."""

    def __init__(self, registry: Registry, large: Callable[[], list[torch.Tensor]]) -> None:
        self._registry = registry
        self._large = large
        self._pieces: dict[str, _Piece] = {}
        self._tensors: dict[int, list[torch.Tensor]] = {}
        sizes = [shards.local(param.tensor).nbytes for param in registry.params]
        most = max(sum(sizes) // _CUTS, _LEAST_BYTES)
        for param, size in zip(registry.params, sizes, strict=True):
            local = shards.local(param.tensor)
            count = min(-(-size // most), len(local)) if local.dim() else 1
            if count <= 1:
                self._pieces[param.name] = _Piece(param, None)
                continue
            edges = [number * len(local) // count for number in range(count + 1)]
            for start, stop in pairwise(edges):
                self._pieces[f"{param.name}[{start}:{stop}]"] = _Piece(param, slice(start, stop))

    def names(self) -> Sequence[str]:
        """Return the names, like ``model.fc.weight[0:16]``."""
        return [*self._pieces, *(f"{_LARGE}{number}" for number in range(len(self._large())))]

    def renew(self) -> None:
        """Look for the tensors again: optimizers make theirs at their first step, and a recovery may replace them."""
        self._tensors.clear()

    def get(self, name: str) -> Sequence[torch.Tensor]:
        """Return the rows of the parameter, then of what its optimizer keeps for it, in the order of ``note``."""
        piece = self._pieces.get(name)
        if piece is None:
            return [self._large()[int(name.removeprefix(_LARGE))]]
        tensors = self._tensors.get(piece.param.index)
        if tensors is None:
            tensors = self._tensors[piece.param.index] = bundles.tensors_of(piece.param)
        return [piece.of(tensor, tensors[0]) for tensor in tensors]

    def note(self, name: str) -> str:
        """Say what a block's arrays are: a replacement's optimizer has none of them."""
        piece = self._pieces.get(name)
        return "" if piece is None else json.dumps(bundles.describe(piece.param))

    def put(self, name: str, value: Sequence[Array]) -> None:
        """Write into the live tensors; those that the block was saved without become zero."""
        for number, tensor in enumerate(self.get(name)):
            if number < len(value):
                tensor.copy_(torch.as_tensor(value[number]))
            else:
                tensor.zero_()

    def missing(self, records: Mapping[str, Record]) -> list[str]:
        """Return the blocks of parameters of which there is no record."""
        return [name for name in self._pieces if name not in records]

    def install(self, records: Mapping[str, Record]) -> list[torch.Tensor]:
        """Make all blocks the state of a rank that has nothing; return the large tensors of what ranks share."""
        of_param: dict[int, list[tuple[_Piece, Record]]] = {}
        for name, piece in self._pieces.items():
            if name in records:
                of_param.setdefault(piece.param.index, []).append((piece, records[name]))
        with torch.no_grad():
            for rows in of_param.values():
                _install(rows)
        self.renew()
        large = sorted((name for name in records if name.startswith(_LARGE)), key=lambda name: int(name[len(_LARGE) :]))
        return [torch.as_tensor(records[name].value[0]) for name in large]


def _install(rows: Sequence[tuple[_Piece, Record]]) -> None:
    """Put together one parameter's blocks, which are of different ages: what is not cut into rows is the newest's."""
    param = rows[0][0].param
    ordered = sorted(rows, key=lambda row: (row[1].iteration, row[1].sequence))
    entries: list[Any] = json.loads(ordered[-1][1].note)
    incoming = bundles.Incoming(param, entries, staged=False)
    own, *state = incoming.tensors
    if own.data_ptr() != (live := shards.local(param.tensor)).data_ptr():
        own.copy_(live)
    for tensor in state:
        tensor.zero_()
    for piece, record in ordered:
        saved = dict(zip(_keys(json.loads(record.note)), record.value, strict=True))
        for key, tensor in zip(_keys(entries), incoming.tensors, strict=True):
            if key in saved:  # it may have been saved before its optimizer's first step
                piece.of(tensor, own).copy_(torch.as_tensor(saved[key]))
    incoming.install()


def _keys(entries: Sequence[Any]) -> list[Any]:
    """Return what the arrays of a block are called: the parameter itself, then what the optimizer keeps."""
    return [None, *(key for key, kind, *_ in entries if kind != "value")]
