"""Threads that may block in gloo, so that the main thread never does. Each is named, and may be abandoned.

At the interpreter's end they are waited for, but only for a moment: a thread that came back from C++ after that would
be torn down in the middle of it and take the process's exit code with it; one that is stuck there harms nobody.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")

_EXIT_WAIT_S = 2.0
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_before_exit: list[Callable[[], None]] = []
_idle: list[_Waiter] = []


def start(name: str, target: Callable[..., None], *args: Any) -> None:
    """Run ``target(*args)`` in a daemon thread."""
    if not _before_exit:
        on_exit(lambda: None)
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()


def on_exit(call: Callable[[], None]) -> None:
    """Call this when the interpreter ends, before the threads are waited for."""
    if not _before_exit:
        atexit.register(_wait_at_exit)
    _before_exit.append(call)


def _wait_at_exit() -> None:
    for call in _before_exit:
        call()
    while _idle:
        _idle.pop().give(None)
    deadline = time.monotonic() + _EXIT_WAIT_S
    while time.monotonic() < deadline:
        alive = [thread for thread in list(_threads) if thread.is_alive()]
        if not alive:
            return
        for thread in alive:  # each may start another
            thread.join(max(0.0, deadline - time.monotonic()))


class Errand(Generic[Result]):
    """One blocking call in a thread of its own, which may be abandoned: a late result is then dropped over there."""

    def __init__(self, name: str, call: Callable[[], list[Result]]) -> None:
        self.done = threading.Event()
        self.result: list[Result] | None = None
        self.error: str | None = None
        self._lock = threading.Lock()
        self._abandoned = False
        start(name, self._run, call)

    def _run(self, call: Callable[[], list[Result]]) -> None:
        result: list[Result] | None = None
        error: str | None = None
        try:
            result = call()
        except Exception as failure:  # noqa: BLE001 (whatever gloo or the store raises becomes the caller's PeerLost)
            error = f"{type(failure).__name__}: {failure}"
        with self._lock:
            if not self._abandoned:
                self.result, self.error, result = result, error, None
        self.done.set()
        del result  # an abandoned group is closed here, not in the main thread

    def abandon(self) -> list[Result]:
        """Want the result no more; return what had already come."""
        with self._lock:
            self._abandoned = True
            late, self.result = self.result, None
        return late if late is not None else []


class Waiting:
    """One blocking call in a thread that is kept for the next one."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._over = threading.Lock()  # bare locks: a message is waited for in the middle of a step
        self._over.acquire()
        self.failure: Exception | None = None

    def over(self, timeout_s: float) -> bool:
        """Wait for its end; whether it came within the time. Once it has, do not ask again."""
        return self._over.acquire(timeout=timeout_s)

    def run(self) -> None:
        """Make the call, in the thread that may block."""
        try:
            self._call()
        except Exception as failure:  # noqa: BLE001 (whatever gloo raises is raised where it was waited for)
            self.failure = failure
        self._over.release()


class _Waiter:
    """A thread that makes such calls, one at a time."""

    def __init__(self) -> None:
        self._given = threading.Lock()
        self._given.acquire()
        self._errand: Waiting | None = None
        start("regrow-wait", self._run)

    def give(self, errand: Waiting | None) -> None:
        """Let it make this call; ``None`` ends the thread."""
        self._errand = errand
        self._given.release()

    def _run(self) -> None:
        while True:
            self._given.acquire()
            errand, self._errand = self._errand, None
            if errand is None:
                return
            errand.run()
            del errand
            _idle.append(self)


def waiting(call: Callable[[], object]) -> Waiting:
    """Make a blocking call in another thread; if it never ends, that thread is never used again."""
    errand = Waiting(call)
    try:
        waiter = _idle.pop()
    except IndexError:
        waiter = _Waiter()
    waiter.give(errand)
    return errand
