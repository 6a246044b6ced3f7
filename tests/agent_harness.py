"""Starts real agents with the torch-less worker, and makes sure that nothing of them is left."""

import contextlib
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from regrow import cli, events
from regrow.agent import agent, command_line  # noqa: F401  imported once here, so that every forked agent starts at once

WORKER = Path(__file__).with_name("agent_worker.py")
DEADLINE_S = 40.0
AT_ONCE_S = 0.2
"""Whoever is killed is noticed within this time: its kernel tells of it, and no time-out has to pass."""


class Job:
    """One forked ``regrow run`` with its output in files."""

    def __init__(self, directory, *words, plan=None, env=None, notes=None, enter=None):
        """``enter`` is called in the new process before anything else."""
        self.directory = Path(directory)
        self.notes_dir = Path(notes or directory)
        self.logs = self.directory / "logs"
        self.returncode = None
        command = ["run", "--log-dir", str(self.logs), "--dead-after", "0.6", "--start-method", "spawn", *words]
        command += [str(WORKER), str(self.notes_dir), json.dumps(plan or {})]
        for name in ("out", "err"):
            (self.directory / name).touch()
        gc.collect()  # or the child might collect a process group of an earlier test, whose threads it does not have
        self.pid = os.fork()
        if self.pid == 0:
            gc.freeze()
            code = 99
            try:
                for fd, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(self.directory / name, os.O_WRONLY | os.O_APPEND), fd)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                os.environ.update(env or {})
                if enter is not None:
                    enter()
                code = cli.main(command)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)

    @property
    def err(self):
        return (self.directory / "err").read_text()

    @property
    def out(self):
        return (self.directory / "out").read_text()

    def notes(self, what=None, **match):
        path = self.notes_dir / "notes.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                one = json.loads(line)
                if what in (None, one["what"]) and all(one.get(k) == v for k, v in match.items()):
                    found.append(one)
        return found

    def events(self, name=None):
        return [event for event in events.read(self.logs) if name in (None, event["event"])]

    def until(self, condition, what=""):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if result := condition():
                return result
            self.poll()
            time.sleep(0.02)
        raise AssertionError(f"timed out waiting for {what}\n{self.err}\n{self.notes()[-20:]}")

    def note(self, what, **match):
        return self.until(lambda: self.notes(what, **match), f"{what} {match}")[0]

    def open_gate(self):
        (self.notes_dir / "gate").touch()

    def signal(self, number):
        os.kill(self.pid, number)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        self.until(lambda: self.poll() is not None, "the agent's end")
        return self.returncode

    def living(self):
        """Which of the processes that ever noted their pid are still there."""
        alive = []
        for pid in {one["pid"] for one in self.notes()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    alive.append(pid)
        return alive

    def assert_clean(self):
        self.until(lambda: not self.living(), "the workers' end")
        assert "Traceback" not in self.err.replace("Traceback (most recent call last): attempt", ""), self.err

    def kill(self):
        if self.poll() is None:
            self.signal(signal.SIGKILL)
            self.wait()
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
