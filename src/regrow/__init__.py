"""Distributed PyTorch training that survives failures in place.

    run = regrow.init()                                  # instead of dist.init_process_group
    run.protect(model=model, optimizer=optimizer)
    for step in run.steps(10_000):                       # yields an interrupted step again
        with step:                                       # a failure in here is healed, then retried
            ...

Importing this package does nothing: no threads, no sockets, no loggers; PyTorch is loaded when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.digest import state_digest
    from regrow.run import Run, Step, init
    from regrow.run.approximate import Approximate
    from regrow.state.registry import per_rank

__all__ = ["Approximate", "Run", "Step", "init", "per_rank", "state_digest"]

__version__ = "0.1.0"

_HOME = {
    "Approximate": "regrow.run.approximate",
    "Run": "regrow.run",
    "Step": "regrow.run",
    "init": "regrow.run",
    "per_rank": "regrow.state.registry",
    "state_digest": "regrow.digest",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'regrow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
