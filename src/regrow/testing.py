"""Fault injection that ships: real signals at named points of a step.

A fault is written the same way on the command line and in the environment variable ``REGROW_FAULTS``::

    kill rank=2 step=5 point=in_backward; stop rank=0 step=9 point=step_end

The library calls ``point(name, step)`` where the points are. Without an installed injector that is one comparison.
Nothing here imitates a failure: the process is killed, stopped or hung by the means of the operating system.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

MEANINGS = {
    "before_forward": "the step has begun, its batch is read, no parameter is touched",
    "in_backward": "the first gradient exists, not all of them: the other ranks wait in an all-reduce",
    "between_updates": "the optimizer has updated some of the parameters, not all",
    "after_update": "all parameters are updated, the step is not yet complete",
    "before_transfer": "in a recovery: the plan is known, this rank has not yet sent or received state",
    "after_transfer": "in a recovery: state was sent or received, the step has not yet begun again",
    "replacement_setup": "a replacement builds its model; it has not joined the world",
    "step_end": "the step is complete on this rank",
    "rejoin": "this rank is about to join a new generation",
    "helping": "this rank is about to compute micro-batches of another rank's replay",
    "checkpoint_write": "beside the steps: half of a pipeline's checkpoint is written, not under its final name",
    "checkpoint_written": "beside the steps: this rank's part of the checkpoint is on storage, nobody has heard of it",
    "checkpoint_commit": "beside the steps: every rank has written its part, this one has dropped nothing yet",
    "disk_copy": "beside the steps: half of a checkpoint of the job is copied",
    "disk_write": "beside the steps: half of this rank's file is written",
    "disk_written": "beside the steps: this rank's file is on storage, nobody has heard of it",
    "disk_rename": "beside the steps: all have written, the leader is about to give the checkpoint its name",
    "disk_mark": "beside the steps: the checkpoint has its name, this rank has not left its mark",
    "disk_commit": "beside the steps: all have left their marks",
    "snapshot_copy": "beside the steps: half of a snapshot is copied to the host's memory",
    "snapshot_taken": "beside the steps: the snapshot is whole, not every rank is known to have one",
    "snapshot_send": "beside the steps: half of a snapshot is on its way to the host that keeps it, too",
}
POINTS = tuple(MEANINGS)
"""The points where a fault can strike: of a step, a recovery, a checkpoint; ``MEANINGS`` says what each is."""

ACTIONS = {
    "kill": "SIGKILL to this process",
    "stop": "SIGSTOP to this process: alive, silent, until SIGCONT",
    "raise": "raise InjectedFault from the point",
    "exit": "end the process at once with a status that is not 0",
    "hang": "the thread waits; the process's other threads go on",
}

EXIT_STATUS = 13
ENVIRONMENT_VARIABLE = "REGROW_FAULTS"
_HANG_S = 24 * 3600.0


class InjectedFault(RuntimeError):
    """What the action ``raise`` raises."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong: at the ``nth`` time (and after) that ``rank`` passes ``point`` at ``step``.

    Without a step, any pass of the point counts. A retry of the step passes the point again. Passes are counted by
    each process for itself; ``times`` is how often the fault strikes over *all* processes that hold the rank one after
    another.
    """

    point: str
    rank: int
    step: int | None = None
    nth: int = 1
    action: str = "kill"
    times: int = 1

    def __post_init__(self) -> None:
        if self.point not in MEANINGS:
            raise ValueError(f"no point is named {self.point!r}; there are {', '.join(POINTS)}")
        if self.action not in ACTIONS:
            raise ValueError(f"no action is named {self.action!r}; there are {', '.join(ACTIONS)}")
        for name, least in (("rank", 0), ("step", 0), ("nth", 1), ("times", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: at least {least} is needed")

    def __str__(self) -> str:
        words = [self.action, f"rank={self.rank}"]
        if self.step is not None:
            words.append(f"step={self.step}")
        words.append(f"point={self.point}")
        words += [f"{name}={value}" for name in ("nth", "times") if (value := getattr(self, name)) != 1]
        return " ".join(words)


def encode(faults: Iterable[Fault]) -> str:
    """Return the text form, for ``REGROW_FAULTS`` or a command line."""
    return "; ".join(map(str, faults))


def decode(text: str) -> list[Fault]:
    """Read the text form. ``ValueError`` says which word is wrong."""
    return [_decode_one(part.strip()) for part in text.split(";") if part.strip()]


def _decode_one(text: str) -> Fault:
    action, *words = text.split()
    fields: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in ("rank", "step", "point", "nth", "times"):
            raise ValueError(f"{word!r} in {text!r}: expected rank=, step=, point=, nth= or times=")
        if name in fields:
            raise ValueError(f"{name}= stands twice in {text!r}")
        fields[name] = value
    for name in ("rank", "point"):
        if name not in fields:
            raise ValueError(f"{name}= is missing in {text!r}; for example: kill rank=2 step=5 point=in_backward")
    point = fields.pop("point")
    numbers: dict[str, int] = {}
    for name, value in fields.items():
        try:
            numbers[name] = int(value)
        except ValueError:
            raise ValueError(f"{name}={value} in {text!r}: a number is needed") from None
    try:
        return Fault(action=action, point=point, rank=numbers.pop("rank"), **numbers)
    except ValueError as error:
        raise ValueError(f"{error} (in {text!r})") from None


@dataclass
class _Armed:
    fault: Fault
    key: str
    passes: int = 0


class Injector:
    """Strikes at the points that the faults of one rank name.

    That a fault has struck is marked by a file in ``marks_dir``, made before it strikes: the next process that holds
    the rank finds it. All incarnations of a rank must be given the same faults, in the same order, and the same
    directory.
    """

    def __init__(self, faults: Iterable[Fault], *, rank: int, marks_dir: Path) -> None:
        self.rank = rank
        self._marks_dir = marks_dir
        self._lock = threading.Lock()
        self._armed: dict[str, list[_Armed]] = {}
        for number, fault in enumerate(faults):
            if fault.rank == rank:
                self._armed.setdefault(fault.point, []).append(_Armed(fault, f"fault-{number}-rank-{rank}"))
        if self._armed:
            marks_dir.mkdir(parents=True, exist_ok=True)

    @property
    def armed(self) -> bool:
        """Whether any fault is for this rank."""
        return bool(self._armed)

    def awaits(self, name: str, step: int | None = None) -> bool:
        """Whether some fault names this point and step."""
        return any(armed.fault.step in (None, step) for armed in self._armed.get(name, ()))

    def point(self, name: str, step: int | None = None) -> None:
        """Pass a point; may not return."""
        if not self._armed:
            return
        if name not in MEANINGS:
            raise ValueError(f"no point is named {name!r}; there are {', '.join(POINTS)}")
        due: Fault | None = None
        with self._lock:  # backward may pass its point in a thread of its own
            for armed in self._armed.get(name, ()):
                if armed.fault.step is not None and armed.fault.step != step:
                    continue
                armed.passes += 1
                if due is None and armed.passes >= armed.fault.nth and self._mark(armed):
                    due = armed.fault
        if due is not None:
            _strike(due, step)

    def _mark(self, armed: _Armed) -> bool:
        """Take one of the fault's times; False if all are used up."""
        for count in range(armed.fault.times):
            try:
                (self._marks_dir / f"{armed.key}-{count}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False


def _strike(fault: Fault, step: int | None) -> None:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            _wait_for_death()
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise InjectedFault(str(dataclasses.replace(fault, step=step)))
        case "exit":
            os._exit(EXIT_STATUS)
        case "hang":
            time.sleep(_HANG_S)
        case _:
            raise AssertionError(fault.action)


def _wait_for_death() -> NoReturn:
    # the signal may reach another thread first: this one must not go on meanwhile
    while True:
        time.sleep(1)


_installed: Injector | None = None


def install(injector: Injector | None) -> None:
    """Make this the process's injector, or remove it. One without faults for its rank costs nothing afterwards."""
    global _installed
    _installed = injector if injector is not None and injector.armed else None


def point(name: str, step: int | None = None) -> None:
    """Pass a named point. Returns at once unless an injector is installed."""
    if _installed is not None:
        _installed.point(name, step)


def awaited(name: str, step: int | None = None) -> bool:
    """Whether a fault is due at this point: the code there may then bring about the situation that the point names."""
    return _installed is not None and _installed.awaits(name, step)
