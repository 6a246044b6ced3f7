"""The handles that operations give back: live ones that an abort always wakes, recorded and replayed ones.

gloo forgets an operation whose message was half written or half read when its connection broke: nobody is told, and
whoever waits for it waits until gloo's own time-out, minutes later. So no caller waits inside of gloo for longer than a
moment without looking whether the generation has ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from regrow.errors import PeerLost
from regrow.group import helpers

if TYPE_CHECKING:
    from regrow.group.network import Network

NO_TIMEOUT = timedelta(0)
LOOK_EVERY = timedelta(milliseconds=250)


class _Wrapping(dist.Work):
    """A handle around the one that gloo gave."""

    def __init__(self, live: dist.Work) -> None:
        super().__init__()
        self._live = live

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


class LiveWork(_Wrapping):
    """An operation under way at one generation. When that ends it fails, whatever becomes of it in gloo."""

    def __init__(self, live: dist.Work, network: Network) -> None:
        super().__init__(live)
        self._network = network
        self._public: torch.futures.Future[Any] | None = None
        self.waited: Callable[[], None] | None = None
        """Told when the wait for it is over, if anyone wants to know."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is done, has failed, or its generation is over and gloo has not noticed."""
        try:
            return self._wait(timeout)
        finally:
            if self.waited is not None:
                told, self.waited = self.waited, None
                told()

    def _wait(self, timeout: timedelta) -> bool:
        if timeout:
            return self._live.wait(timeout)
        while not self._live.is_completed():
            if self._network.given_up():
                raise self._lost()
            with contextlib.suppress(RuntimeError):  # not yet, or it failed and says so again below
                return self._live.wait(LOOK_EVERY)
        return self._live.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that fails at the latest when the generation is over."""
        if self._public is None:
            promise = Promise(self._network.outstanding, self._lost)
            self._public = promise.public
            self._live.get_future().add_done_callback(promise.keep)
            if self._network.ended.is_set():  # too late for whoever gives up what was outstanding then
                self._network.give_up_soon()
        return self._public

    def _lost(self) -> PeerLost:
        generation = self._network.generation
        return PeerLost(f"generation {generation} ended before the operation was done", generation=generation)

    def synchronize(self) -> None:
        """Wait as the live operation would."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether waiting would return or raise at once."""
        return self._live.is_completed() or self._network.given_up()


class LiveMessage(LiveWork):
    """An operation that gloo must not be asked to wait for a moment only.

    Of a message it then ends the connection; of a reduce-scatter, which is a sum and a copy, it waits for ever.
    """

    def _wait(self, timeout: timedelta) -> bool:
        """Wait in another thread, which is left behind where gloo has forgotten the message."""
        errand = helpers.waiting(lambda: self._live.wait(timeout) if timeout else self._live.wait())
        while not errand.over(LOOK_EVERY.total_seconds()):
            if self._network.given_up():
                raise self._lost()
        if errand.failure is not None:
            raise errand.failure
        return True


class Promise:
    """A future that is fulfilled once, by whoever takes it out of the outstanding ones.

    That is the operation or, if it never ends, the one who gives up on it. Made for every operation that DDP waits for,
    in the middle of backward: so there is no lock where a set's own atomic removal is enough.
    """

    __slots__ = ("_inner", "_lost", "_outstanding", "public")

    def __init__(self, outstanding: set[Promise], lost: Callable[[], PeerLost]) -> None:
        self._outstanding = outstanding
        self._lost = lost
        self._inner: torch.futures.Future[Any] = torch.futures.Future()
        # raised in a callback, the error is one for those who wait in C++, too
        self.public: torch.futures.Future[Any] = self._inner.then(_unwrap)
        outstanding.add(self)

    def keep(self, future: torch.futures.Future[Any]) -> None:
        """Take over what became of the operation."""
        if self._taken():
            try:
                value = future.value()
            except RuntimeError as error:
                value = error
            self._inner.set_result(value)

    def give_up(self) -> None:
        """Fail, unless it is fulfilled."""
        if self._taken():
            self._inner.set_result(self._lost())

    def _taken(self) -> bool:
        try:
            self._outstanding.remove(self)
        except KeyError:
            return False
        return True


def _unwrap(future: torch.futures.Future[Any]) -> Any:
    value = future.value()
    if isinstance(value, Exception):
        raise value
    return value


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


class RecordedWork(_Wrapping):
    """A live operation whose outputs are taken down as soon as the caller learns that it is complete.

    Not before: the caller may have to issue its matching operation first, so waiting here could block everyone. Not
    later: the caller may change the tensors as soon as it knows.
    """

    def __init__(self, live: dist.Work, capture: Callable[[int, str | None], None]) -> None:
        super().__init__(live)
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

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that takes the outputs down before anyone who waits on it goes on."""

        def then(future: torch.futures.Future[Any]) -> Any:
            value = future.value()
            self._captured()
            return value

        return self._live.get_future().then(then)
