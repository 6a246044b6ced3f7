"""A running checkpoint of a state in blocks, and the recovery of some of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from regrow.iterative import cache, storage
from regrow.iterative.blocks import Blocks, checked_names, known
from regrow.iterative.cache import Cache
from regrow.iterative.record import Record
from regrow.iterative.recovery import Recovery
from regrow.iterative.storage import Storage
from regrow.iterative.writer import Writer
from regrow.plan.perturbation import predict
from regrow.plan.priority import Chooser, Priority, Schedule

_ROUNDS_SEEN = 64
"""How many rounds tell how the algorithm converges: at its end it may do so otherwise than at its beginning."""


class RunningCheckpoint:
    """Saves a part of the blocks every few iterations: those that have moved farthest since they were saved.

    Args:
        blocks: the state.
        every: C; in so many iterations as many bytes are saved as the state has.
        fraction: r, the part that is saved at once, every r * C iterations. 1: an ordinary checkpoint.
        priority: ``distance``, ``relative``, ``round_robin`` or ``random``.
        directory: where it is kept on storage; ``None``: in memory only.
        replace: write over what another process has left in the directory: after ``restore`` has read it.
        seed: for ``random``; the same on all ranks.
        iteration: the one that the blocks are after now. All of them are saved at once, to begin with.
        timeout_s: how long storage may take for a round before ``step`` raises.
        at_once: whether all blocks are on storage when this returns; else they are written in the background, as those
            of a round are, and ``failure`` tells if they could not be.
    """

    def __init__(
        self,
        blocks: Blocks,
        *,
        every: int,
        fraction: float = 1 / 8,
        priority: str = "distance",
        directory: Path | str | None = None,
        replace: bool = False,
        seed: int = 0,
        iteration: int = 0,
        timeout_s: float = 60.0,
        at_once: bool = True,
    ) -> None:
        self._schedule = Schedule(every, fraction)
        try:
            self._priority = Priority(priority)
        except ValueError:
            choices = ", ".join(each.value for each in Priority)
            raise ValueError(f"priority={priority!r} is unknown: give one of {choices}") from None
        if directory is not None and not replace and storage.exists(Path(directory)):
            raise ValueError(
                f"there is a running checkpoint in {directory} already: take it with restore() and say replace=True, "
                "or give another directory"
            )
        self._names = checked_names(blocks)
        self._chooser = Chooser(self._priority, self._schedule.share, seed=seed)
        self._timeout_s = timeout_s
        self._iteration = self._looked_at = iteration
        self._cache = Cache(blocks, self._names, iteration)
        self._speeds: deque[tuple[int, float]] = deque(maxlen=_ROUNDS_SEEN)
        self._writer: Writer | None = None
        if directory is not None:
            records = [self._record(name) for name in self._names]
            self._writer = Writer(Storage(Path(directory), records) if at_once else Path(directory))
            if not at_once:
                self._writer.submit(records)

    @property
    def failure(self) -> str | None:
        """Why the last round is not on storage, if that is so; it is tried again with the next one."""
        return None if self._writer is None else self._writer.failure

    @property
    def saved_at(self) -> dict[str, int]:
        """After which iteration each block was saved."""
        return {name: entry.iteration for name, entry in self._cache.entries.items()}

    @property
    def busy(self) -> bool:
        """Whether storage is still being given the last round: ``step`` would wait for it."""
        return self._writer is not None and not self._writer.wait(0.0)

    @property
    def looked_at(self) -> int:
        """The iteration after which distances were last taken."""
        return self._looked_at

    @property
    def speeds(self) -> list[tuple[int, float]]:
        """How far the whole state moved in an iteration, at each of the last rounds: iteration and distance."""
        return list(self._speeds)

    @property
    def moved(self) -> list[tuple[float, int]]:
        """How far each block had moved when it was last looked at, and in how many iterations."""
        return [(each.moved, each.looked_after) for each in self._cache.entries.values() if each.looked_after > 0]

    def step(self, iteration: int) -> list[str]:
        """Say that an iteration is over; return the blocks that were saved, mostly none.

        Their values are copied before this returns; storage gets them later, from another thread.
        """
        self._iteration = iteration
        if not self._schedule.due(iteration):
            return []
        moved = self._cache.look(iteration)
        self._looked_at = iteration
        self._speeds.append((iteration, cache.speed(self._cache.entries)))
        chosen = self._chooser.choose(
            iteration,
            sizes=self._cache.sizes(),
            moved=moved,
            saved_at=[entry.iteration for entry in self._cache.entries.values()],
            norms=self._cache.norms() if self._priority is Priority.RELATIVE else (),
        )
        names = [self._names[number] for number in chosen]
        if self._writer is None:
            for name in names:
                self._cache.take(name, iteration)
            return names
        self._await(self._writer, self._timeout_s)  # it reads what is about to be overwritten
        for name in names:
            self._cache.take(name, iteration)
        due = dict.fromkeys([*names, *sorted(self._writer.owed)])
        self._writer.submit([self._record(name) for name in due])
        return names

    def recover(self, lost: Iterable[str], *, full: bool = False) -> Recovery:
        """Put lost blocks back to their saved values; with ``full`` all blocks, as if all were lost.

        Iterations are counted on from there, also if all has gone back.
        """
        names = self._names if full else known(lost, self._names)
        entries = self._cache.entries
        stale = {name: max(self._iteration - entries[name].iteration, 0) for name in names}
        norm = math.sqrt(sum(entries[name].drift(age) ** 2 for name, age in stale.items()))
        since_look = self._iteration - self._looked_at
        speeds = [speed for _, speed in self._speeds]
        cost = predict(norm, self.moved, since_look, speeds, self._schedule.period)
        self._cache.restore(names, self._iteration)
        return Recovery(self._iteration, stale, norm, cost)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that was saved is on storage; raises if it cannot be brought there."""
        if self._writer is None:
            return
        self._await(self._writer, self._timeout_s if timeout_s is None else timeout_s)
        if self._writer.failure is not None:
            raise OSError(self._writer.failure)

    def close(self) -> None:
        """End the thread that writes, after what it has to do. What is saved can still be recovered from."""
        writer, self._writer = self._writer, None
        if writer is not None and not writer.close(self._timeout_s):
            raise TimeoutError(f"storage has not taken the last blocks in {self._timeout_s:g} s: they may not be there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _await(self, writer: Writer, timeout_s: float) -> None:
        if not writer.wait(timeout_s):
            raise TimeoutError(
                f"storage has not taken the blocks of the last round in {timeout_s:g} s: does it hang? Raise every= or "
                "timeout_s=, or do without directory="
            )

    def _record(self, name: str) -> Record:
        entry = self._cache.entries[name]
        return Record(name, entry.iteration, 0, entry.speed, entry.value, entry.note)
