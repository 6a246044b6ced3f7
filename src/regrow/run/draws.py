"""What a micro-batch draws from torch's generator, learnt once and drawn again without computing anything else.

So a rank that is to compute the fifth micro-batch of a step knows the random numbers that it begins with, without the
four before it. Whether that is right is checked: whoever has computed a micro-batch says where the generator stands.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


class _Like:
    """Stands for a tensor of which only the memory's layout counts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


class Draws(TorchDispatchMode):
    """Used as a context, takes down the operations that draw random numbers; ``again`` lets them draw once more."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any]] = []
        self.generators = False
        """Whether some operation drew from a generator of its own: drawing again would move that."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation that draws."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            given = tree_leaves((args, kwargs))
            self.generators |= any(isinstance(each, torch.Generator) for each in given)
            self._calls.append((func, *tree_map_only(torch.Tensor, _Like, (args, kwargs))))
        return func(*args, **kwargs)

    def again(self) -> None:
        """Draw as many numbers as the first time."""
        with torch.no_grad():
            for func, args, kwargs in self._calls:
                made_args, made_kwargs = tree_map_only(_Like, _Like.make, (args, kwargs))
                func(*made_args, **made_kwargs)


def fingerprint(state: torch.Tensor) -> str:
    """Return a short name for a generator's state."""
    return xxhash.xxh3_128_hexdigest(state.numpy().data)
