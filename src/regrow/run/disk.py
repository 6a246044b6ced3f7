"""Checkpoints on storage, in two phases: copied while a step computes, written while others do; and going on from one.

At the start of a step at which one is due a thread copies this rank's share of the state; the step's update waits for
the end of that. Then it is written, beside the training, and committed by all (``commit``). At most one is under way.
When the next is due all ranks learn together, when one is committed: a step that nobody has come to yet.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from regrow import testing
from regrow.courier import Address, Courier
from regrow.disk import content, dcp, marks
from regrow.disk.content import Names, Where
from regrow.disk.saved import Saved
from regrow.disk.storage import Storage
from regrow.errors import PeerLost
from regrow.ids import Rank, Step
from regrow.plan.frequency import Governor
from regrow.rules import Source
from regrow.run import gate
from regrow.run.checkpointing import Checkpointing
from regrow.run.commit import Committer, Refused, Written
from regrow.run.finding import Finder
from regrow.run.gather import gather_json
from regrow.run.progress import Progress
from regrow.run.roles import Roles
from regrow.state import image, shards
from regrow.state.registry import Registry

_LOOK_EVERY_S = 0.25
_GATE_WITHIN = timedelta(days=7)
_FIRST_AFTER = 12
"""The first one comes after so many steps, unless it was said how often: by then it is known how long a step takes."""
_HANGS_AFTER_S = 600.0
_HEARD_S = 0.25
"""So long it may take until all have heard when the next one is due."""

Say = Callable[[str], None]
Event = Callable[..., None]


@dataclass
class _Task:
    """One checkpoint under way. The state must not change before ``copied``."""

    step: Step
    generation: int
    small: image.Small | None
    """``None``: this rank has missed the step; it only tells the others so."""
    copied: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = math.inf
    called_off: bool = False
    error: BaseException | None = None


class Disk:
    """Writes, finds and reads them. ``superseded``: whether a newer generation has begun."""

    def __init__(
        self,
        rank: Rank,
        roles: Roles,
        *,
        settings: Checkpointing,
        courier: Courier,
        registry: Registry,
        replacement: bool,
        superseded: Callable[[], bool],
        say: Say,
        event: Event,
    ) -> None:
        """A part of the set-up: all ranks find out who shares a storage with whom."""
        self._rank = rank
        self._world = len(roles.stages)
        self._settings = settings
        self._courier = courier
        self._registry = registry
        self._superseded = superseded
        self._say = say
        self._event = event
        self._storage = Storage.of(settings.url)
        self._replacement = replacement
        storages, self._addresses = self._meet(roles.nonce)
        self._nonce = roles.nonce[:8]
        together = next(ranks for ranks in storages if rank in ranks)
        replicas = tuple(roles.replicas(rank))
        self._where = Where(rank=rank, stage=roles.stages[rank], replicas=replicas, together=together)
        self._names = Names(registry, self._where.prefix)
        self._alone = content.alone(registry, self._names, self._where.prefix)
        self._finder = Finder(
            rank, self._world, self._storage, registry, self._names, self._where, say=say, event=event
        )
        self._committer = Committer(rank, storages, self._storage, courier, settings.keep)
        self._governor = Governor(overhead=settings.overhead, fixed=settings.every, mtbf_s=settings.mtbf_s)
        self._buffers: dict[str, torch.Tensor] = {}
        self._task: _Task | None = None
        self._due: Step | None = None
        self._last: Step | None = None
        self._now = Step(0)
        self._began_s: float | None = None
        self._generation = 0
        self._ended: Step | None = None
        self._moved_s = 0.0
        """When the storage took something the last time."""
        self._progress = Progress(say if rank == 0 else None)
        self.waiting = False
        """Whether an update waits for a copy right now."""
        self._waited_s = 0.0
        self._bytes_s: float | None = None

    def _meet(self, nonce: str) -> tuple[list[tuple[int, ...]], list[Address]]:
        """Return which ranks share a storage, and where each hears of checkpoints."""
        probe = f"probe-{nonce}-"
        if not self._replacement:
            try:
                self._storage.make("")
                self._storage.write(f"{probe}{self._rank}", b"")
            except OSError as error:
                raise ValueError(f"--ckpt-dir {self._storage} cannot be written to: {error}") from None
        dist.barrier()
        seen = [] if self._replacement else [n for n in self._storage.names() if n.startswith(probe)]
        rows = gather_json({"sees": [int(name[len(probe) :]) for name in seen], "address": self._courier.address})
        dist.barrier()
        if not self._replacement:
            self._storage.remove(f"{probe}{self._rank}")
        storages = sorted({tuple(sorted(row["sees"])) for row in rows})
        if sorted(rank for ranks in storages for rank in ranks) != [*range(self._world)]:
            raise ValueError(
                f"--ckpt-dir {self._storage}: ranks do not see the same files there ({storages}): give a directory "
                "whose contents are the same at once wherever it is mounted"
            )
        return storages, [_address(row["address"]) for row in rows]

    # what there is ---------------------------------------------------------------------------------------------------

    def holding(self) -> dict[str, Any]:
        """Return what others must know to make a plan."""
        return {"disk": tuple(self._finder.usable()[-16:])}

    def rates(self) -> dict[Source, float | None]:
        """Return how many bytes a second the last checkpoint was written at."""
        return {Source.DISK: self._bytes_s}

    def envelope(self) -> dict[str, Any]:
        """Return where this rank hears of checkpoints, and what was agreed on."""
        return {"disk": [list(self._courier.address), self._last, self._governor.every]}

    def find(self) -> Saved | None:
        """In the set-up: return the newest checkpoint that every rank can read, if there is any.

        A replacement goes through the same, and is given nothing: what it takes up is for a plan to say.
        """
        return self._finder.find(listens=self._replacement)

    def read(self, step: Step) -> Saved:
        """In a recovery, on all ranks: open a checkpoint of which no rank has found anything damaged."""
        return self._finder.read(step)

    # generations -----------------------------------------------------------------------------------------------------

    def first(self, generation: int, step: Step, *, saved: bool) -> None:
        """The run begins, at this step, of which there is a checkpoint already if it begins with one."""
        self._last = step if saved else None
        self._courier.resume(generation, self._addresses)
        self._begin_at(generation, step, self._settings.every or _FIRST_AFTER)
        self._tidy()

    def _tidy(self) -> None:
        """Remove what nobody needs any more; storage that does not answer now is asked after the next checkpoint."""
        try:
            self._committer.tidy(self._finder.damaged, self._last)
        except OSError as error:
            self._event("disk_untidy", why=str(error))
            self._say(f"old checkpoints stay for now: {error}")

    def _begin_at(self, generation: int, step: Step, after: int) -> None:
        self._generation = generation
        self._now = step
        self._due = Step(step + after)
        self._began_s = None

    def sever(self, *, below: int) -> None:
        """Generations before this one are over: wake whoever waits for the others. Quick."""
        self._courier.sever(below=below)

    def abandon(self) -> None:
        """The step was interrupted: let the copy end, since the state may change from now on."""
        task, self._task = self._task, None
        self._began_s = None
        if task is not None:
            task.called_off = True
            task.copied.wait()  # it looks up between two tensors
            if not task.over.wait(_LOOK_EVERY_S):
                self._buffers = {}  # storage that hangs keeps that thread, and what it writes, not the training

    def resume(self, generation: int, step: Step, envelopes: Sequence[dict[str, Any]]) -> None:
        """All go on, the foremost at this step: the next one is due as long after the last as all had agreed."""
        rows = [envelope["disk"] for envelope in envelopes]
        last = max((row[1] for row in rows if row[1] is not None), default=None)
        every = max(int(row[2]) for row in rows)
        self._governor.adopt(every)
        self._last = last
        self._ended = None  # a replacement knows of no attempt to write the run's end: all make another
        self._courier.resume(generation, [_address(row[0]) for row in rows])
        self._committer.forget()
        due = every if last is None else max(last + every - step, 1)
        self._begin_at(generation, step, due)

    def finish(self, step: Step, small: image.Small) -> None:
        """All have done their last step: write the end of the run, and wait for it. What is under way comes first.

        Raises:
            PeerLost: the generation has ended meanwhile.
        """
        self._wait_for(self._task)
        while self._due is not None and self._due < step:  # heard of too late: others may wait for what is said of it
            task, self._due = _Task(self._due, self._generation, None), None
            self._start(task)
            self._wait_for(task)
        if self._last != step and self._ended != step:
            self._start(_Task(step, self._generation, small))
            self._wait_for(self._task)
        self._ended = step

    def _wait_for(self, task: _Task | None) -> None:
        """Wait until it is over: as long as its storage takes something now and then."""
        if task is None:
            return
        self._moved_s = time.monotonic()
        while not task.over.wait(_LOOK_EVERY_S):
            if self._superseded():
                raise PeerLost("a new generation began while a checkpoint was written", generation=task.generation)
            if time.monotonic() > self._moved_s + _HANGS_AFTER_S:
                self._say(f"the checkpoint of step {task.step} is given up: {self._storage} takes nothing any more")
                return
        if task.error is not None:
            raise task.error

    def close(self) -> None:
        """The run is over: say what checkpoints have cost."""
        self._event("disk", waited_s=self._waited_s, every=self._governor.every, why=self._governor.explain())
        self._courier.close()

    # a step ----------------------------------------------------------------------------------------------------------

    def begin(self, step: Step, small: Callable[[], image.Small]) -> None:
        """A step begins: take a checkpoint of its start, in the background, if one is due.

        Raises:
            PeerLost: others cannot be told of the one before any more, though nobody is known to be lost.
        """
        if self._task is not None and isinstance(self._task.error, PeerLost):
            raise self._task.error
        now_s, self._now = time.monotonic(), step
        if self._began_s is not None:
            busy = self._task is not None and self._task.ended_s > self._began_s  # also if for a part of it only
            self._governor.step(now_s - self._began_s, busy=busy)
        self._began_s = now_s
        if self._due is None and (task := self._task) is not None and not task.over.is_set():
            self._progress.under_way(now_s, task.began_s, task.step, self._last, str(self._storage))
        if self._due is None or step < self._due:
            return
        missed = step > self._due
        task = _Task(self._due, self._generation, None if missed else small())
        self._due = None
        self._start(task)

    def _start(self, task: _Task) -> None:
        """Begin one; the one before it is over, since only then is another due."""
        self._task = task
        if task.small is None:
            task.copied.set()
        threading.Thread(target=self._run, args=(task,), name="regrow-disk", daemon=True).start()

    def settle(self) -> None:
        """The state is about to change: wait until the step's copy is taken."""
        task = self._task
        if task is None:
            return
        if task.error is not None and not isinstance(task.error, PeerLost):
            raise task.error
        if task.copied.is_set():
            return
        began = time.monotonic()
        self.waiting = True
        try:
            while not task.copied.wait(_LOOK_EVERY_S):
                if self._superseded():
                    raise PeerLost("a new generation began while a checkpoint was copied", generation=task.generation)
        finally:
            self.waiting = False
            self._waited_s += time.monotonic() - began

    # in the background -----------------------------------------------------------------------------------------------

    def _run(self, task: _Task) -> None:
        try:
            began_s = time.monotonic()
            part = self._written(task)
            found = self._committer.commit(
                task.step, self._save(task), part, task.generation, lambda: self._go_on(task, "committed")
            )
            self._agree(task, found, time.monotonic() - began_s)
        except PeerLost as lost:
            task.error = lost
        except Exception as error:  # noqa: BLE001 (raised by the step's update, or at the run's end)
            task.error = error
        finally:
            task.copied.set()
            task.ended_s = time.monotonic()
            task.over.set()

    def _go_on(self, task: _Task, doing: str) -> None:
        """Raise if the training has gone on without it: whatever this thread does then is late."""
        if task.called_off:
            raise PeerLost(f"the step was interrupted while a checkpoint was {doing}", generation=task.generation)

    def _save(self, task: _Task) -> str:
        return f"{self._nonce}g{task.generation}"

    def _written(self, task: _Task) -> Written | Refused:
        """Copy this rank's share, and write it; what goes wrong is told to the others, and training goes on."""
        if task.small is None:
            return Refused("it had gone beyond that step before it heard that one was due")
        began_s = time.monotonic()
        what = self._copied(task, task.small)
        copied_s = time.monotonic()
        task.copied.set()
        directory = self._committer.directory(task.step, self._save(task))
        file = f"__{self._rank}_{task.generation}.distcp"
        total = sum(item.nbytes for item, _ in what)

        def between(done: int) -> None:
            self._go_on(task, "written")
            if 2 * done > total:
                testing.point("disk_write", task.step)
            self._moved_s = time.monotonic()
            self._progress.written(self._moved_s, task.step, done, total)

        try:
            self._storage.make(directory)
            rows, facts = dcp.write(self._storage, f"{directory}/{file}", what, between)
        except OSError as error:
            return Refused(f"{error}")
        testing.point("disk_written", task.step)
        write_s = time.monotonic() - copied_s
        self._bytes_s = total / max(write_s, 1e-6)
        self._governor.saved(copy_s=copied_s - began_s, write_s=write_s)
        return Written(file, rows, facts)

    def _copied(self, task: _Task, small: image.Small) -> list[tuple[dcp.Item, Any]]:
        """Return copies of what this rank writes: of what several ranks have, its share."""
        nested = content.content(self._registry, self._names, small, self._where)
        found = dcp.items(nested)
        sizes = {}
        for item, value in found:
            sizes[item.name, content.holders(item.name, value, self._where, self._alone)] = item.nbytes
        chosen = content.assign(sizes)
        mine = [(item, value) for item, value in found if chosen[item.name] == self._rank]
        copies = []
        for number, (item, value) in enumerate(mine):
            self._go_on(task, "copied")
            if number == len(mine) // 2:
                testing.point("disk_copy", task.step)
            copies.append((item, value if item.dtype is None else self._copy(item.name, shards.local(value))))
        return copies

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Copy to memory that is kept for the next time: fresh pages would cost several times as much."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._buffers[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return buffer.copy_(tensor)

    def _agree(self, task: _Task, found: marks.Found | Refused, seconds: float) -> None:
        """All have left their marks, or know that there is no checkpoint; and learn when the next one is due."""
        refused = self._meet_all(task, "marks", float(isinstance(found, Refused)))
        if refused and not isinstance(found, Refused):
            found = Refused("another rank could not leave its mark")
        testing.point("disk_commit", task.step)
        if isinstance(found, Refused):
            self._event("disk_refused", step=task.step, why=found.why)
            if self._rank == 0:
                self._say(f"there is no checkpoint of step {task.step}: {found.why}")
        else:
            self._last = task.step
            self._finder.committed(task.step)
            self._tidy()
            self._event("disk_committed", step=task.step, bytes=found.nbytes, seconds=seconds)
        every = self._governor.turn().every
        margin = 2 + math.ceil(_HEARD_S / max(self._governor.baseline_s or _HEARD_S, 1e-3))
        agreed = self._meet_all(task, "every", every)
        self._governor.adopt(int(agreed))
        intervals = max(-(-(self._now + margin - task.step) // int(agreed)), 1)
        wanted = task.step + intervals * int(agreed)
        self._due = Step(int(self._meet_all(task, "due", wanted)))
        if isinstance(found, marks.Found):
            self._progress.committed(time.monotonic(), task.step, seconds, self._governor.explain())

    def _meet_all(self, task: _Task, what: str, number: float) -> float:
        """Learn the greatest of what all ranks say."""
        self._go_on(task, "committed")
        name = f"disk/{self._save(task)}/{task.step}/{what}"
        within, generation = _GATE_WITHIN, task.generation
        return gate.meet(self._courier, self._rank, self._world, name, number, within, generation=generation)


def _address(value: Sequence[Any]) -> Address:
    return str(value[0]), int(value[1])
