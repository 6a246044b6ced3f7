"""A run without an agent: the same script under ``python`` or ``torchrun``, unprotected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from regrow.run.base import Run
from regrow.run.roles import Roles
from regrow.run.step import Step


class PlainRun(Run):
    """Yields steps and heals nothing."""

    def steps(self, count: int) -> Iterator[Step]:
        """Yield the steps 0 to ``count`` - 1."""
        self._started = True
        if self._stage is not None:
            self._bind(Roles.exchange(self._stage, ""))
        batches = self._batches()
        for index in range(count):
            yield Step(self, index, batches)
            batches.next_step()

    def enter(self) -> None:
        """Nothing to do."""

    def leave(self, error: BaseException | None) -> bool:
        """Errors go their way."""
        return False


def init_plain(*, backend: str | None, timeout: timedelta, torchrun: bool) -> PlainRun:
    """Make an ordinary process group, of this process alone when no launcher set one up, and say so once."""
    name = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if torchrun:
        dist.init_process_group(name, timeout=timeout)
    else:
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    run = PlainRun(dist.get_rank(), dist.get_world_size())
    if run.rank == 0:
        print(
            "[regrow] not started by `regrow run`: this run is not protected against failures",
            file=sys.stderr,
            flush=True,
        )
    return run
