"""The parameters of a PyTorch model as blocks: pieces along their first dimension, with the optimizer's moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from regrow.iterative.arrays import Array


class _Piece(NamedTuple):
    param: torch.Tensor
    rows: slice | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach() if self.rows is None else tensor.detach()[self.rows]


class ParameterBlocks:
    """Blocks of a model. Each parameter is cut into up to ``pieces`` parts along its first dimension.

    What the optimizer keeps in the shape of a parameter is cut alike and travels with it. Counters and whatever else it
    keeps is not part of any block: it is small, and must be kept by other means.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        pieces: int = 1,
    ) -> None:
        if pieces < 1:
            raise ValueError(f"a parameter cannot be cut into {pieces} pieces: give 1 or more")
        self._optimizer = optimizer
        self._pieces: dict[str, _Piece] = {}
        for name, param in named:
            count = min(pieces, len(param)) if param.dim() else 1
            if count <= 1:
                self._pieces[name] = _Piece(param, None)
                continue
            edges = [number * len(param) // count for number in range(count + 1)]
            for start, stop in pairwise(edges):
                self._pieces[f"{name}[{start}:{stop}]"] = _Piece(param, slice(start, stop))

    def names(self) -> Sequence[str]:
        """Return the names, like ``fc.weight[0:16]``."""
        return list(self._pieces)

    def get(self, name: str) -> Sequence[torch.Tensor]:
        """Return a piece of the parameter, then of the optimizer's moments, which appear with its first step."""
        piece = self._pieces[name]
        return [piece.of(piece.param), *(piece.of(moment) for moment in self._moments(piece.param))]

    def put(self, name: str, value: Sequence[Array]) -> None:
        """Write into them. Moments that were not there yet when the block was saved begin at zero again."""
        first, *others = self.get(name)
        with torch.no_grad():
            first.copy_(torch.as_tensor(value[0]))
            for number, moment in enumerate(others, 1):
                if number < len(value):
                    moment.copy_(torch.as_tensor(value[number]))
                else:
                    moment.zero_()

    def _moments(self, param: torch.Tensor) -> list[torch.Tensor]:
        if self._optimizer is None:
            return []
        state = self._optimizer.state.get(param, {})
        moments = [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]
        return [value for _, value in sorted(moments) if value.shape == param.shape and param.dim()]
