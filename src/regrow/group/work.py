"""The handles that operations give back while a set-up is recorded or replayed. Live ones give back gloo's own.

Never waits on its own account, and starts no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NO_TIMEOUT = timedelta(0)


class ReplayedWork(dist.Work):
    """An operation that was over before it began: its outputs came out of a record."""

    def __init__(self, outputs: Sequence[torch.Tensor], source_rank: int = -1, failure: str | None = None) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._source = source_rank
        self._failure = failure

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return at once, or fail as the first time."""
        if self._failure is not None:
            raise RuntimeError(self._failure)
        return True

    def synchronize(self) -> None:
        """Nothing is outstanding."""

    def is_completed(self) -> bool:
        """Always."""
        return True

    def is_success(self) -> bool:
        """Whether it succeeded the first time."""
        return self._failure is None

    def exception(self) -> RuntimeError | None:
        """What the wait for it raises."""
        return None if self._failure is None else RuntimeError(self._failure)

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._outputs

    def source_rank(self) -> int:
        """The sender that was recorded, for a receive from anyone."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future that is done."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        if self._failure is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(RuntimeError(self._failure))  # type: ignore[arg-type]
        return future


class RecordedWork(dist.Work):
    """A live operation whose outputs are taken down as soon as the caller learns that it is complete.

    Not before: the caller may have to issue its matching operation first, so waiting here could block everyone. Not
    later: the caller may change the tensors as soon as it knows.
    """

    def __init__(self, live: dist.Work, capture: Callable[[int, str | None], None]) -> None:
        super().__init__()
        self._live = live
        self._capture: Callable[[int, str | None], None] | None = capture

    def _captured(self, failure: str | None = None) -> None:
        capture, self._capture = self._capture, None
        if capture is not None:
            try:
                source = int(self._live._source_rank())
            except RuntimeError:  # only a receive from anyone knows its source
                source = -1
            capture(source, failure)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the live operation, then take down what it gave."""
        try:
            done = self._live.wait(timeout) if timeout else self._live.wait()
        except RuntimeError as failure:
            self._captured(str(failure))
            raise
        self._captured()
        return done

    def synchronize(self) -> None:
        """Wait as the live operation would."""
        self._live.synchronize()
        self._captured()

    def is_completed(self) -> bool:
        """Ask the live operation; a caller that hears yes may not wait any more."""
        done = self._live.is_completed()
        if done and self._live.exception() is None:
            self._captured()
        return done

    def is_success(self) -> bool:
        """Ask the live operation."""
        return self._live.is_success()

    def exception(self) -> Any:
        """Ask the live operation."""
        return self._live.exception()

    def result(self) -> list[torch.Tensor]:
        """Ask the live operation."""
        return self._live.result()

    def source_rank(self) -> int:
        """Ask the live operation."""
        return self._live._source_rank()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that takes the outputs down before anyone who waits on it goes on."""

        def then(future: torch.futures.Future[Any]) -> Any:
            value = future.value()
            self._captured()
            return value

        return self._live.get_future().then(then)
