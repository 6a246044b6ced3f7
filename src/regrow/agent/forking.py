"""Workers that are forked from a template, which has imported PyTorch already (see ``template.py``)."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.agent import template
from regrow.agent.process import Launch, Process, Started, executed

_PR_SET_CHILD_SUBREAPER = 36
_LOADING_S = 120.0
_FORKING_S = 2.0
_AGAIN_AFTER_S = 1.0
_FAILURES = 3
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Adopted:
    """A process that the template forked and that is now a child of this one."""

    pid: int

    def wait(self) -> int:
        """Reap it; return its exit code, or the negative number of the signal."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Nursery:
    """Keeps a template, and launches workers from it; the long way where there is none.

    ``command`` is the workers' own: an interpreter, its options, and a script or ``-m`` and a module.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], note: Callable[..., None]) -> None:
        self._command = command
        self._env = env
        self._note = note
        self._process: Process | None = None
        self._connection: socket.socket | None = None
        self._ready = False
        self._failures = 0
        self._ending = False
        self._restart: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the template and wait until it has loaded; without one if it cannot be had."""
        self._close()
        ours, theirs = socket.socketpair()
        self._connection = ours
        with theirs:
            command = [*self._command[:2], template.__file__, str(theirs.fileno()), *self._command[2:]]
            try:
                self._process = Process(executed(command, self._env, keep=(theirs.fileno(),)), self._exited)
            except OSError:  # no such interpreter: whoever starts a worker says so
                return
        ours.setblocking(False)
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(ours, readable.set)  # also when it ends: then there is nothing to read
        try:
            await asyncio.wait_for(readable.wait(), _LOADING_S)
        except TimeoutError:
            self._give_up(f"not ready within {_LOADING_S:.0f} s")
            return
        finally:
            loop.remove_reader(ours)
        ours.settimeout(_FORKING_S)
        try:
            answer, _ = template.receive(ours)
        except (OSError, EOFError):
            return  # it has ended, and that is seen to
        if answer.get("ready"):
            self._ready, self._failures = True, 0
            self._note("template_ready", pid=self._process.pid)
        else:
            self._failures = _FAILURES
            self._give_up(str(answer.get("problem")))

    def launch(self, command: Sequence[str], env: Mapping[str, str]) -> Launch:
        """Return what starts a worker with an environment of its own."""

        def start(stdout: int | None, stderr: int | None) -> Started:
            if self._ready:
                try:
                    return self._fork(command, env, {1: stdout, 2: stderr})
                except (OSError, EOFError, ValueError) as error:
                    self._give_up(f"{type(error).__name__}: {error}")
            return executed(command, env)(stdout, stderr)

        return start

    def _fork(self, command: Sequence[str], env: Mapping[str, str], streams: dict[int, int | None]) -> Adopted:
        assert self._connection is not None
        given = {number: stream for number, stream in streams.items() if stream is not None}
        script = command[2:]  # after the interpreter and its -u
        module = script[0] == "-m"
        request: dict[str, Any] = {
            "agent": os.getpid(),
            "command": list(command),
            "argv": list(script[1:] if module else script),
            "module": module,
            "env": dict(env),
            "cwd": str(Path.cwd()),
            "streams": list(given),
        }
        # for this moment an orphan below us becomes our child: the worker, whose parent has ended
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            template.send(self._connection, request, list(given.values()))
            answer, _ = template.receive(self._connection)
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if "pid" not in answer:
            raise OSError(answer.get("problem"))
        return Adopted(int(answer["pid"]))

    def end(self) -> None:
        """End the template."""
        self._ending = True
        if self._restart is not None:
            self._restart.cancel()
        if self._process is not None:
            self._process.kill()
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _give_up(self, why: str) -> None:
        self._ready = False
        if self._process is not None:
            self._note("template_unfit", pid=self._process.pid, why=why)
            self._process.kill()

    def _exited(self, process: Process) -> None:
        self._ready = False
        if self._ending:
            return
        self._note("template_lost", pid=process.pid, why=process.why)
        self._failures += 1
        if self._failures < _FAILURES:
            self._restart = asyncio.get_running_loop().create_task(self._again())

    async def _again(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(_AGAIN_AFTER_S)
            await self.start()
