"""Running checkpoints and partial recovery for anything that iterates until it has converged.

    blocks = ArrayBlocks.rows(weights=w)
    with RunningCheckpoint(blocks, directory="saved", every=16) as checkpoint:
        for iteration in range(1, 1000):
            w -= rate * gradient(w)
            checkpoint.step(iteration)

When some blocks are lost, ``checkpoint.recover(names)`` puts back those alone, as they were some iterations ago; the
others keep what they have. That is not the state of an undisturbed run: it is one from which the algorithm converges
again, mostly after fewer iterations than if all had gone back. Never to be used where results must be the same bits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from regrow.iterative.blocks import ArrayBlocks, Blocks
from regrow.iterative.checkpoint import RunningCheckpoint
from regrow.iterative.record import Damaged
from regrow.iterative.recovery import Recovery, restore
from regrow.iterative.storage import Found, InUse, read
from regrow.plan.perturbation import Cost

if TYPE_CHECKING:
    from regrow.iterative.parameters import ParameterBlocks

__all__ = [
    "ArrayBlocks",
    "Blocks",
    "Cost",
    "Damaged",
    "Found",
    "InUse",
    "ParameterBlocks",
    "Recovery",
    "RunningCheckpoint",
    "read",
    "restore",
]


def __getattr__(name: str) -> Any:
    if name == "ParameterBlocks":  # the only one that needs PyTorch, which takes a second to load
        return importlib.import_module("regrow.iterative.parameters").ParameterBlocks
    raise AttributeError(f"module 'regrow.iterative' has no attribute {name!r}")
