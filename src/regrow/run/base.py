"""What every run offers, protected or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from regrow import data
from regrow.run.step import Batches, Step
from regrow.state.registry import Registry


class Run(ABC):
    """A training run: what ``regrow.init()`` returns."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        """This worker's rank in the world."""
        self.world_size = world_size
        """Number of workers."""
        self._registry = Registry()
        self._loader: data.Loader | None = None
        self._wait_free = False
        self._exact = True
        self._started = False

    def protect(self, *, wait_free: bool = False, exact: bool = True, loader: Any = None, **objects: Any) -> None:
        """Say what must survive: the model, its optimizer, schedulers, scaler, loader, anything with a state_dict.

        Args:
            wait_free: update each bucket's parameters as soon as its gradient has been reduced, while backward goes on.
                ``optimizer.step()`` stays in the script and does what is left to do.
            exact: keep the few bits per element that taking an update back would otherwise lose. With ``False``, an
                undone update is off by a few ulp, and nothing is kept.
            loader: a map-style ``DataLoader`` or a ``regrow.data.Loader``; ``step.batch`` comes from it. objects: by
            name. Modules, optimizers, and anything with ``state_dict`` and ``load_state_dict``. What differs
                from rank to rank goes in as ``regrow.per_rank(object)``.
        """
        if self._started:
            raise ValueError("protect() comes before run.steps()")
        if loader is None and not objects:
            raise ValueError("protect() was given nothing: protect(model=model, optimizer=optimizer, ...)")
        if loader is not None:
            if self._loader is not None:
                raise ValueError("protect() was given a loader before: a run has one loader")
            if not isinstance(loader, (DataLoader, data.Loader)):
                raise ValueError(
                    f"protect(loader=...): a {type(loader).__name__} cannot be resumed at a position; pass a "
                    "torch DataLoader over a map-style dataset, or a regrow.data.Loader"
                )
            self._loader = data.resumable(loader)
            self._loader.bind(self.rank, self.world_size)
        self._registry.add(objects)
        self._wait_free = self._wait_free or wait_free
        self._exact = self._exact and exact
        self._check()

    def _check(self) -> None:  # noqa: B027 (an unprotected run refuses nothing)
        """Refuse now what would only fail after a crash."""

    def _batches(self) -> Batches:
        return Batches(self._loader.next_batch if self._loader is not None else None)

    @abstractmethod
    def steps(self, count: int) -> Iterator[Step]:
        """Yield the steps 0 to ``count`` - 1; an interrupted one is yielded again."""
