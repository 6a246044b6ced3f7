"""One step of training, as the user sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol


class StepOwner(Protocol):
    """What a step asks of the run that yields it."""

    def enter(self) -> None:
        """The step's body begins."""
        ...

    def leave(self, error: BaseException | None) -> bool:
        """The step's body ended; whether it was interrupted and will be done again."""
        ...


class Batches:
    """The batches of the step in progress: fetched when first asked for, and the same ones again on a retry."""

    def __init__(self, fetch: Callable[[], Any] | None) -> None:
        self._fetch = fetch
        self._fetched: list[Any] = []

    def get(self, index: int) -> Any:
        """Return the step's batch of that index."""
        if self._fetch is None:
            raise ValueError("step.batch needs a loader: call run.protect(loader=...) with a map-style DataLoader")
        while len(self._fetched) <= index:
            self._fetched.append(self._fetch())
        return self._fetched[index]

    def next_step(self) -> None:
        """The step is complete: drop its batches."""
        self._fetched.clear()


class Step:
    """A step: use it as ``with step:``. Another worker's failure in there is healed and the step is yielded again."""

    def __init__(self, owner: StepOwner, index: int, batches: Batches, *, attempt: int = 0) -> None:
        self._owner = owner
        self._batches = batches
        self.index = index
        """Number of this step, from 0."""
        self.attempt = attempt
        """0 at the first try; greater when the step was interrupted before."""
        self.entered = False
        self.completed = False
        """Whether the body ran to its end. What follows ``with step:`` also runs when it did not: ask there."""

    def __index__(self) -> int:
        return self.index

    def __repr__(self) -> str:
        return f"Step({self.index})" if self.attempt == 0 else f"Step({self.index}, attempt={self.attempt})"

    @property
    def batch(self) -> Any:
        """This step's batch; the same one again on a retry."""
        return self._batches.get(0)

    def batches(self, count: int) -> Iterator[Any]:
        """Yield ``count`` batches, for gradient accumulation within one step; the same ones again on a retry."""
        for index in range(count):
            yield self._batches.get(index)

    def __enter__(self) -> Step:
        self.entered = True
        self._owner.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        interrupted = self._owner.leave(error)
        self.completed = kind is None and not interrupted
        return interrupted
