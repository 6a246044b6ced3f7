"""What every run offers, protected or not."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from regrow import data
from regrow.run.approximate import Approximate, given
from regrow.run.contact import is_schedule
from regrow.run.roles import Roles
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
        self._stage: int | None = None
        self._schedules: list[Any] = []
        self._checkpoint_dir: str | os.PathLike[str] | None = None
        self._checkpoint_every = 100
        self._build_stage: Callable[[int], nn.Module] | None = None
        self._approximate: Approximate | None = None

    def protect(
        self,
        *,
        wait_free: bool = False,
        exact: bool = True,
        loader: Any = None,
        stage: int | None = None,
        checkpoint_every: int | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        build_stage: Callable[[int], nn.Module] | None = None,
        approximate: bool | Approximate = False,
        **objects: Any,
    ) -> None:
        """Say what must survive: the model, its optimizer, schedulers, scaler, loader, anything with a state_dict.

        Args:
            wait_free: update each bucket's parameters as soon as its gradient has been reduced, while backward goes on.
                ``optimizer.step()`` stays in the script and does what is left to do.
            exact: keep the few bits per element that taking an update back would otherwise lose. With ``False``, an
                undone update is off by a few ulp, and nothing is kept.
            loader: a map-style ``DataLoader`` or a ``regrow.data.Loader``; ``step.batch`` comes from it.
            objects: by name. Modules, optimizers, and anything with ``state_dict`` and ``load_state_dict``. What
                differs from rank to rank goes in as ``regrow.per_rank(object)``. Schedules of
                ``torch.distributed.pipelining`` go in as they are.
            stage: for pipelines: which stage this rank holds. Ranks of the same stage are replicas of each other; a
                stage that loses all of them is computed again from its last checkpoint, over what the others sent it.
            checkpoint_every: for pipelines: at the start of every so many steps each rank writes its state to disk.
            checkpoint_dir: where to; each rank must find its own again there. By default, in the log directory.
            build_stage: for pipelines with a schedule: returns a module like the one of the ``PipelineStage`` with this
                index, whatever its values. With it, idle ranks compute micro-batches of a stage that is replayed.
            approximate: for sharded models and pipelines: where nothing exact is left of a lost rank, let it go on with
                values that are some steps old, while the others keep theirs; the result is then not the undisturbed
                run's. ``True``, or a ``regrow.Approximate`` that says how often what is saved. The same on all ranks.
        """
        if self._started:
            raise ValueError("protect() comes before run.steps()")
        schedules = {name: value for name, value in objects.items() if is_schedule(value)}
        objects = {name: value for name, value in objects.items() if name not in schedules}
        if stage is not None:
            if isinstance(stage, bool) or not isinstance(stage, int):
                raise ValueError(f"protect(stage={stage!r}): a number is needed, the same on replicas of one stage")
            if self._stage not in (None, stage):
                raise ValueError(f"protect(stage={stage}): it was {self._stage} before; a rank holds one stage")
            if self._stage is None and self._loader is not None:
                raise ValueError(
                    "protect(stage=...) must come before, or together with, loader=: it says who shares it"
                )
            self._stage = stage
        if checkpoint_every is not None:
            if checkpoint_every < 1:
                raise ValueError(f"protect(checkpoint_every={checkpoint_every}): at least 1 is needed")
            self._checkpoint_every = checkpoint_every
        if build_stage is not None:
            if not callable(build_stage):
                raise ValueError("protect(build_stage=...): a function is needed that takes a stage's index")
            if not schedules and not self._schedules:
                raise ValueError("protect(build_stage=...) needs a schedule of torch.distributed.pipelining beside it")
            self._build_stage = build_stage
        if (schedules or checkpoint_every is not None or checkpoint_dir is not None) and self._stage is None:
            raise ValueError("protect(stage=...) is missing: say which stage of the pipeline this rank holds")
        self._checkpoint_dir = checkpoint_dir if checkpoint_dir is not None else self._checkpoint_dir
        self._schedules += schedules.values()
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
        self._registry.add(objects)
        if self._loader is not None and self._stage is None:
            self._loader.bind(self.rank, self.world_size)  # of a pipeline's ranks, replicas share the data: see steps()
        self._approximate = given(approximate) or self._approximate
        self._wait_free = self._wait_free or wait_free
        self._exact = self._exact and exact
        self._check()

    def _check(self) -> None:  # noqa: B027 (an unprotected run refuses nothing)
        """Refuse now what would only fail after a crash."""

    def _bind(self, roles: Roles) -> None:
        """Let the replicas of one stage share the data; other stages of the same pipeline read the same of it."""
        if self._loader is not None and self._stage is not None:
            replicas = roles.replicas(self.rank)
            self._loader.bind(replicas.index(self.rank), len(replicas))

    def _batches(self) -> Batches:
        return Batches(self._loader.next_batch if self._loader is not None else None)

    @abstractmethod
    def steps(self, count: int) -> Iterator[Step]:
        """Yield the steps 0 to ``count`` - 1; an interrupted one is yielded again."""
