"""Hear of a process's death before the kernel has taken down its memory.

A killed process is gone for its parent, and its sockets close, only when all of its memory is freed: tens of
milliseconds for a small worker, seconds for a large one. But whoever waits for a *robust* mutex that one of its threads
holds is woken as soon as that thread ends, which comes first. So the worker's main thread, which ends only with the
process, holds such a mutex in memory that it shares with its agent, and a thread of the agent waits for it.

Only a hint: where there are no robust mutexes, or the worker lets go of its own, the agent waits for the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

_SIZE = 4096
_ATTRIBUTES_BYTES = 64  # more than any libc needs
_ROBUST = 1
_SHARED = 1
_LOOK_EVERY_S = 1.0
_libc = ctypes.CDLL(None)


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Lifeline:
    """A robust mutex in a file that two processes map."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._mutex = ctypes.c_char.from_buffer(self._memory)

    @classmethod
    def create(cls, path: Path) -> Lifeline:
        """Make the file and the mutex in it; ``OSError`` where that cannot be."""
        with path.open("xb") as file:
            file.truncate(_SIZE)
        line = cls(path)
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        try:
            _check(_libc.pthread_mutexattr_init(attributes))
            _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
            _check(_libc.pthread_mutexattr_setpshared(attributes, _SHARED))
            _check(_libc.pthread_mutex_init(ctypes.byref(line._mutex), attributes))
        except AttributeError as error:
            raise OSError(errno.ENOSYS, f"this libc has no {error}") from None
        return line

    def hold(self) -> None:
        """Take the mutex in this thread. At the interpreter's end it is let go: that is no death."""
        _check(_libc.pthread_mutex_lock(ctypes.byref(self._mutex)))
        owner = os.getpid()
        atexit.register(lambda: self._let_go() if os.getpid() == owner else None)

    def _let_go(self) -> None:
        _libc.pthread_mutex_unlock(ctypes.byref(self._mutex))

    def cut(self, timeout_s: float) -> bool | None:
        """Wait until the holder is dead (True) or lets go (False); None if neither has come in time."""
        until = time.time() + timeout_s
        limit = _Time(int(until), int(until % 1 * 1e9))
        code = _libc.pthread_mutex_timedlock(ctypes.byref(self._mutex), ctypes.byref(limit))
        if code == errno.ETIMEDOUT:
            return None
        self._let_go()
        return code == errno.EOWNERDEAD


def hold(directory: Path) -> str | None:
    """Make and hold this process's lifeline, from its main thread; return its file, or None where there is none."""
    if threading.current_thread() is not threading.main_thread():
        return None  # another thread may end without the process
    path = directory / f"life.{os.getpid()}"
    try:
        Lifeline.create(path).hold()
    except OSError:
        return None
    return str(path)


class Observer:
    """A thread that calls ``died()`` when a process's lifeline is cut. It ends with the process or with ``stop``."""

    def __init__(self, path: Path, died: Callable[[], None]) -> None:
        self._line = Lifeline(path)
        with contextlib.suppress(OSError):
            path.unlink()
        self._died = died
        self._stopped = False
        threading.Thread(target=self._run, name="regrow-lifeline", daemon=True).start()

    def stop(self) -> None:
        """Watch no more. The thread ends within a second."""
        self._stopped = True

    def _run(self) -> None:
        while not self._stopped:
            cut = self._line.cut(_LOOK_EVERY_S)
            if cut is not None:
                if cut and not self._stopped:
                    self._died()
                return


def dying_by(pid: int) -> int | None:
    """Return the signal that a process is dying of while its memory is taken down; None if that cannot be told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        status = int(text.split()[-1])
    except (OSError, ValueError, IndexError):
        return None
    return status & 0x7F or None


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
