"""This rank's running checkpoint: every few steps the blocks that have moved farthest, for when nothing else is left.

The blocks are copied at the start of a step, before anything is computed: they are the state after whole steps. They
lie in memory beside the state, which is what distances are taken from, and go to storage in another thread. Whatever
storage does, training goes on: a round that would have to wait is left out.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from regrow.disk.urls import local_path
from regrow.errors import PeerLost
from regrow.ids import Rank, Step
from regrow.iterative import RunningCheckpoint
from regrow.iterative.record import Record
from regrow.iterative.storage import glance, read
from regrow.plan import Running
from regrow.plan.priority import Schedule
from regrow.run.approximate import Approximate
from regrow.run.checkpointing import Checkpointing
from regrow.run.rank_blocks import RankBlocks
from regrow.slots import Slots
from regrow.state import image

_CLOSE_S = 10.0

Say = Callable[[str], None]
Event = Callable[..., None]


def directory_for(rank: Rank, nonce: str, ckpt: Checkpointing | None, scratch: Path) -> Path:
    """Return where a rank's running checkpoint lies: beside the job's checkpoints, or among the logs of its host.

    Beside those it is found from other hosts if the directory is shared. An object store cannot be written in place.
    A name of its own for each run: what an earlier one has left is never taken for this one's.
    """
    shared = None if ckpt is None else local_path(ckpt.url)
    base = scratch if shared is None else shared
    return base / "running" / nonce / f"rank{rank}"


class Rounds:
    """Takes, tells of and puts back one rank's blocks. Used by the thread that trains."""

    def __init__(
        self,
        settings: Approximate,
        directory: Path,
        blocks: RankBlocks,
        *,
        slots: Slots,
        say: Say,
        event: Event,
    ) -> None:
        """``slots``: memory that outlives this rank's worker, with its small state."""
        self._settings = settings
        self._schedule = Schedule(settings.every, settings.fraction)
        self._directory = directory
        self._blocks = blocks
        self._slots = slots
        self._say = say
        self._event = event
        self._checkpoint: RunningCheckpoint | None = None
        self._names: list[str] = []
        self._ages: tuple[tuple[int, int, float], ...] = ()
        """Of what was put back, until all go on."""
        self._last: Step | None = None
        self._trouble: str | None = None
        self._incomplete = False
        """Whether it was found that what lies on storage is not enough to go on from."""
        self._skipped = 0
        self._rounds = 0
        self._round_s = 0.0

    # a step ----------------------------------------------------------------------------------------------------------

    def first(self, step: Step) -> None:
        """Save all blocks, before anyone hears that the set-up is done: from then on they may be needed."""
        for other in self._directory.parent.parent.glob(f"*/{self._directory.name}"):
            shutil.rmtree(other, ignore_errors=True)  # an earlier run's, which was killed
            with contextlib.suppress(OSError):
                other.parent.rmdir()
        checkpoint = self._begin_anew(step)
        try:
            checkpoint.flush()
        except (OSError, TimeoutError) as error:
            self._worry(f"its running checkpoint could not be begun: {error}")
        self._last = step

    def begin(self, step: Step) -> None:
        """A step begins: if a round is due, copy its blocks; storage is given them meanwhile."""
        if step == self._last:
            return  # it runs again
        self._last = step
        if self._checkpoint is None:
            self._begin_anew(step)
            return
        if not self._schedule.due(step):
            return
        if self._checkpoint.busy:
            self._skipped += 1
            self._worry("a round of its running checkpoint is left out: storage is not done with the one before")
            return
        self._worry(self._checkpoint.failure)
        self._blocks.renew()
        if self._names != list(self._blocks.names()):  # an object that ranks share has other tensors than before
            self._close()
            self._begin_anew(step)
            return
        began = time.monotonic()
        self._checkpoint.step(step)
        self._rounds += 1
        self._round_s += time.monotonic() - began

    def _begin_anew(self, step: Step) -> RunningCheckpoint:
        """Save all blocks: copied now, and written as those of a round are."""
        self._blocks.renew()
        self._names = list(self._blocks.names())
        self._checkpoint = RunningCheckpoint(
            self._blocks,
            every=self._settings.every,
            fraction=self._settings.fraction,
            priority=self._settings.priority,
            directory=self._directory,
            replace=True,
            iteration=step,
            at_once=False,
        )
        self._event("running_begun", step=step, blocks=len(self._names), directory=str(self._directory))
        return self._checkpoint

    def _worry(self, trouble: str | None) -> None:
        """Say what is wrong once, and not at every round."""
        if trouble is not None and trouble != self._trouble:
            self._say(f"{trouble}; if this rank is lost, older blocks are put back, or none")
            self._event("running_trouble", why=trouble)
        self._trouble = trouble

    # a recovery ------------------------------------------------------------------------------------------------------

    def holding(self, *, fresh: bool) -> dict[str, Any]:
        """Return what others must know to make a plan."""
        period = self._schedule.period
        if fresh:
            self._wait_for_storage()
            return {"running": Running(ages=() if self._incomplete else _ages(self._glance()), period=period)}
        moved: dict[int, list[float]] = {}
        checkpoint = self._checkpoint
        for far, iterations in checkpoint.moved if checkpoint is not None else []:
            moved.setdefault(iterations, []).append(far)
        running = Running(
            ages=self._ages,
            own_steps=tuple(sorted(self._slots.left().starts)),
            period=period,
            speeds=tuple((at, far) for at, far in checkpoint.speeds if math.isfinite(far)) if checkpoint else (),
            moved=tuple((iterations, _squares(far)) for iterations, far in sorted(moved.items())),
            looked_at=checkpoint.looked_at if checkpoint is not None else 0,
        )
        return {"running": running}

    def _glance(self) -> dict[str, Record]:
        try:
            return glance(self._directory)
        except (OSError, ValueError) as error:
            self._worry(f"its running checkpoint cannot be read: {error}")
            return {}

    def put_back(self, step: Step) -> list[torch.Tensor]:
        """This rank has nothing: take all blocks as they were saved; return the large tensors of what ranks share.

        Raises:
            PeerLost: they are gone since the plan was made, or a block has no record that is whole: the plan did not
                know, and another one is needed.
        """
        try:
            found = read(self._directory)
        except (OSError, ValueError) as error:
            unread = image.Damaged(f"the running checkpoint cannot be read: {error}")
            raise PeerLost(str(unread)) from unread  # nobody else can find that out: no need to wait for them
        for text in found.damaged:
            self._say(f"running checkpoint: {text}")
        if missing := self._blocks.missing(found.records):
            self._incomplete = True
            self._event("running_incomplete", step=step, missing=missing, damaged=found.damaged)
            sentence = f"of {len(missing)} blocks, {missing[0]} for one, the running checkpoint has nothing whole"
            self._say(f"{sentence}: it is not used")
            raise PeerLost(sentence) from image.Damaged(sentence)
        large = self._blocks.install(found.records)
        self._ages = _ages(found.records)
        stale = {name: max(step - record.iteration, 0) for name, record in found.records.items()}
        self._event("put_back", step=step, stale=stale, damaged=found.damaged)
        return large

    def resume(self, step: Step, *, replaced: bool) -> None:
        """All go on. ``replaced``: this rank's state is another one than it had, so all blocks are saved anew."""
        self._slots.drop_after(step)
        self._last = None
        self._ages = ()
        self._incomplete = False
        if replaced:
            self._close()

    # the end ---------------------------------------------------------------------------------------------------------

    def _wait_for_storage(self) -> None:
        """What this process has itself saved so far is to be found there."""
        if self._checkpoint is not None:
            with contextlib.suppress(OSError, TimeoutError):  # then what was written before is found
                self._checkpoint.flush(_CLOSE_S)

    def _close(self) -> None:
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            self._wait_for_storage()
            with contextlib.suppress(TimeoutError):
                checkpoint.close()

    def close(self) -> None:
        """The run is over: say what it has cost the training; nothing of this is needed any more."""
        seconds = self._round_s / max(self._rounds, 1)
        self._event("running", rounds=self._rounds, skipped=self._skipped, round_s=seconds)
        self._close()
        shutil.rmtree(self._directory, ignore_errors=True)
        for parent in (self._directory.parent, self._directory.parent.parent):
            with contextlib.suppress(OSError):
                parent.rmdir()  # by whoever is the last


def _ages(records: Mapping[str, Record]) -> tuple[tuple[int, int, float], ...]:
    found: dict[int, list[float]] = {}
    for record in records.values():
        found.setdefault(record.iteration, []).append(record.speed)
    return tuple((at, len(speeds), _squares(speeds)) for at, speeds in sorted(found.items()))


def _squares(values: list[float]) -> float:
    return sum(value * value for value in values if math.isfinite(value))
