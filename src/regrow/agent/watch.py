"""Look at a host's workers again and again, and end those that exist but do nothing. Judging is ``health``'s affair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from regrow.agent.health import Limits, Verdict
from regrow.agent.worker import Worker


def setup_deadline_s(first_setup_s: float) -> float:
    """How long a replacement may take until it goes on: generous, since it shares the machine with the others."""
    return 60.0 + 10.0 * first_setup_s


class Watch:
    """``workers()`` are those that must show signs of life now; ``kill(worker, why)`` ends one.

    While ``complete()`` is false, a rank has no host to live on: whoever waits for it does so as long as it takes.
    """

    def __init__(
        self,
        limits: Limits,
        workers: Callable[[], Iterable[Worker]],
        complete: Callable[[], bool],
        kill: Callable[[Worker, str], None],
    ) -> None:
        self._limits = limits
        self._workers = workers
        self._complete = complete
        self._kill = kill
        self.first_setup_s = 0.0
        self.setup_deadline_s = setup_deadline_s(0.0)

    def set_up_in(self, seconds: float) -> None:
        """Learn how long the first set-up took: a replacement's is measured by it."""
        self.first_setup_s = seconds
        self.setup_deadline_s = setup_deadline_s(seconds)

    async def run(self) -> None:
        """Look several times within ``dead_after_s``. Never returns."""
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._limits.dead_after_s / 5)
            now = time.monotonic()
            workers = list(self._workers())
            if now - before > self._limits.dead_after_s / 2:  # we were stopped ourselves: silence proves nothing
                for worker in workers:
                    worker.heard(now)
            before = now
            for worker in workers:
                self._look(worker, now)

    def _look(self, worker: Worker, now: float) -> None:
        if worker.process.gone.is_set():
            return
        if worker.assigned and worker.link is not None and not worker.link.closed.is_set():
            judgement = worker.judge(now, self._limits)
            if judgement.verdict is not Verdict.WELL:
                self._kill(worker, judgement.reason)
                return
        elif worker.link is None and worker.stopped_for(now) > self._limits.dead_after_s:
            self._kill(worker, f"stopped for {worker.stopped_for(now):.1f} s while it started")
            return
        if not self._complete():
            worker.attempt_t = now
        most_s = self.setup_deadline_s + worker.fetching_s
        if worker.replacement and not worker.resumed and now - worker.attempt_t > most_s:
            self._kill(worker, f"its set-up as a replacement took more than {most_s:.0f} s")
