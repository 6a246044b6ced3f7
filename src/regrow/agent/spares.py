"""Warm spares: processes that have everything imported and wait for a rank.

Starting one costs CPU that a recovery needs more, so the agent says when to refill. It never decides who is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from regrow.agent.options import StartError
from regrow.agent.worker import Worker

_FAILURES_LIMIT = 2


class SparePool:
    """Keeps up to ``wanted`` spares. ``start`` starts a process if it ``may``, ``say`` tells the person who watches."""

    def __init__(
        self, wanted: int, start: Callable[[], Worker], may: Callable[[], bool], say: Callable[[str], None]
    ) -> None:
        self._wanted = wanted
        self._start = start
        self._may = may
        self._say = say
        self._failures = 0
        self._starting: list[Worker] = []
        self._ready: list[Worker] = []

    @property
    def workers(self) -> list[Worker]:
        """All spares, ready or not."""
        return [*self._starting, *self._ready]

    def refill_in(self, seconds: float) -> None:
        """Start as many as are missing then."""
        asyncio.get_running_loop().call_later(seconds, self._refill)

    def _refill(self) -> None:
        if not self._may():
            return
        try:
            while len(self._starting) + len(self._ready) < self._wanted:
                self._starting.append(self._start())
        except StartError as error:  # no memory, no more processes: the job itself can do without spares
            self._wanted = 0
            self._say(f"spares are switched off: {error}")

    def arrived(self, worker: Worker) -> None:
        """A spare has said hello: from now on it can be given a rank."""
        self._failures = 0
        self._starting.remove(worker)
        self._ready.append(worker)

    def take(self) -> Worker | None:
        """Return a spare that is ready, or else one that is starting, or None. It is no spare any more.

        One that is starting is ahead of any process that would be started now, and need not share the CPU with it.
        """
        while self._ready:
            worker = self._ready.pop(0)
            if worker.link is not None and not worker.link.closed.is_set() and not worker.process.gone.is_set():
                return worker
            worker.process.kill()
        return self._starting.pop(0) if self._starting else None

    def exited(self, worker: Worker) -> bool:
        """A spare is gone; return whether another one should be started later."""
        if worker in self._ready:
            self._ready.remove(worker)
            return True
        if worker in self._starting:
            self._starting.remove(worker)
            self.failed(worker)
        return self._wanted > 0

    def failed(self, worker: Worker) -> None:
        """A spare ended before it said hello; if that goes on there is no use in starting more."""
        if (worker.process.returncode or 0) < 0:
            return  # someone killed it: that says nothing about the script
        self._failures += 1
        if self._failures == _FAILURES_LIMIT:
            self._wanted = 0
            last = f"; its last line on stderr: {worker.process.last_line}" if worker.process.last_line else ""
            self._say(
                f"spares are switched off: twice in a row one ended ({worker.process.why}) before regrow.init(), "
                f"perhaps since the script reads RANK before it{last}"
            )
