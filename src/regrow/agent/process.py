"""One operating-system process of the job: started, watched by pidfd, killed with everything it forked.

It knows nothing of ranks, generations or frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

_PR_SET_PDEATHSIG = 1
KILLED_S = 5.0
"""How long a killed process may take to end before it counts as gone: it may hang in the kernel."""
_libc = ctypes.CDLL(None, use_errno=True)


class Started(Protocol):
    """A process that runs, and is this one's child."""

    @property
    def pid(self) -> int:
        """Its number."""

    def wait(self) -> int:
        """Reap it; return its exit code, or the negative number of the signal."""


Launch = Callable[[int | None, int | None], Started]
"""Starts a process in a session of its own, with these files for stdout and stderr, or with ours."""


def executed(command: Sequence[str], env: Mapping[str, str], *, keep: tuple[int, ...] = ()) -> Launch:
    """Return what starts a program; ``keep`` are file descriptors that it inherits."""
    parent = os.getpid()
    prctl = _libc.prctl

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the prctl: nobody would kill us any more
            os._exit(1)

    def start(stdout: int | None, stderr: int | None) -> Started:
        return subprocess.Popen(
            command,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=before_exec,
            pass_fds=keep,
        )

    return start


class Process:
    """A child in a session of its own, killed by the kernel if this process dies.

    ``on_exit(process)`` is called once, in the event loop, as soon as it is gone. With ``capture_stderr`` what it
    writes there passes through to our stderr and ``last_line`` keeps the newest line.
    """

    def __init__(
        self,
        launch: Launch,
        on_exit: Callable[[Process], None],
        *,
        stdout: str = "",
        stderr: str = "",
        capture_stderr: bool = False,
    ) -> None:
        self.last_line = ""
        self.started_t = time.monotonic()
        self._on_exit = on_exit
        self._stderr: BinaryIO | None = None
        with contextlib.ExitStack() as files:
            out = files.enter_context(Path(stdout).open("ab")).fileno() if stdout else None
            err = files.enter_context(Path(stderr).open("ab")).fileno() if stderr else None
            if capture_stderr:
                reading, err = os.pipe()
                files.callback(os.close, err)
                self._stderr = os.fdopen(reading, "rb", 0)
            try:
                self._started = launch(out, err)
            except BaseException:
                if self._stderr is not None:
                    self._stderr.close()
                raise
        self.pid: int = self._started.pid
        self.returncode: int | None = None
        self.dying_of: int | None = None
        """The signal that it is dying of, if that is known before it is gone."""
        self.gone = asyncio.Event()
        self._pidfd: int | None = os.pidfd_open(self.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, self._exited)
        if self._stderr is not None:
            os.set_blocking(self._stderr.fileno(), False)
            loop.add_reader(self._stderr.fileno(), self._pass_stderr)

    @property
    def why(self) -> str:
        """How it ended, in words."""
        code = self.returncode
        if code is None and self.dying_of is not None:
            code = -self.dying_of
        if code is None:
            return "does not end"
        if code < 0:
            try:
                return signal.Signals(-code).name
            except ValueError:
                return f"signal {-code}"
        return f"exit code {code}"

    def signal_group(self, number: int) -> None:
        """Signal it and everything it forked, unless it has been reaped."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL the whole group."""
        self.signal_group(signal.SIGKILL)

    def abandon(self) -> None:
        """Treat it as gone although it does not die (it hangs in the kernel); does nothing if it is."""
        if not self.gone.is_set():
            self._forget()
            self._on_exit(self)

    def _exited(self) -> None:
        # before it is reaped its pid cannot be reused, so the group that dies here is its own: a forked loader process
        # that lives on would hold its sockets open and hide the death from its peers
        self.kill()
        self.returncode = self._started.wait()
        self._pass_stderr()
        self._forget()
        self._on_exit(self)

    def _forget(self) -> None:
        loop = asyncio.get_running_loop()
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._close_stderr()
        self.gone.set()

    def _pass_stderr(self) -> None:
        pipe = self._stderr
        if pipe is None or pipe.closed:
            return
        try:
            data = os.read(pipe.fileno(), 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._close_stderr()
            return
        lines = [line for line in data.decode(errors="replace").splitlines() if line.strip()]
        if lines:
            self.last_line = lines[-1].strip()
        with contextlib.suppress(OSError, ValueError):  # our own stderr may be closed: that is not the worker's fault
            sys.stderr.flush()
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()

    def _close_stderr(self) -> None:
        pipe = self._stderr
        if pipe is not None and not pipe.closed:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()


async def end_all(processes: Sequence[Process], grace_s: float, hurry: asyncio.Event) -> None:
    """Ask all to end, then make them: SIGTERM, a grace that ``hurry`` cuts short, SIGKILL."""
    for process in processes:
        process.signal_group(signal.SIGTERM)
        process.signal_group(signal.SIGCONT)
    everyone = asyncio.gather(*(process.gone.wait() for process in processes))
    waits: set[asyncio.Future[Any]] = {everyone, asyncio.ensure_future(hurry.wait())}
    _, pending = await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for process in processes:
        process.kill()
    with contextlib.suppress(TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(everyone, KILLED_S)
    for future in pending:
        future.cancel()


def cpu_and_state(pid: int) -> tuple[int, str] | None:
    """Return the clock ticks a process has used and its state letter, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may contain anything
    return int(fields[11]) + int(fields[12]), fields[0]
