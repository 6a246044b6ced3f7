"""Turn what a worker says, and how it ends, into membership events. Touches only what is known of it."""

from __future__ import annotations

from typing import NamedTuple

from regrow.agent.happenings import Event, Exited, Finished, Forgotten, Lost, LostWorker, Resumed, SetupDone
from regrow.agent.worker import Worker
from regrow.agent.world import Raised
from regrow.wire import Frame

MAX_RECORD_BYTES = 256 << 20
_MAX_TRACEBACK_CHARS = 20_000
_SLOWEST_STORAGE = 10e6
"""Bytes a second: a replacement that reads its state from a storage as slow as that is not stuck."""


class Heard(NamedTuple):
    """An event to report, and the set-up record that has to be kept before it counts."""

    event: Event
    record: bytes | None = None


def hear(worker: Worker, frame: Frame, now: float, t: float) -> Heard | None:
    """Take in a frame of a worker that has a rank; return what the world must learn of it.

    ``KeyError``, ``TypeError`` or ``ValueError`` for what a worker would never send.
    """
    rank, incarnation, head = worker.rank, worker.incarnation, frame.head
    assert rank is not None
    match head["type"]:
        case "setup_done":
            if len(frame.blob) > MAX_RECORD_BYTES:
                raise ValueError(f"a set-up record of {len(frame.blob)} bytes, over the {MAX_RECORD_BYTES} allowed")
            worker.set_up = True
            worker.progress_t = now
            # a replacement was given the record; what it recorded itself is a replay, not the first set-up
            done = SetupDone(rank, incarnation, t, kept=bool(head.get("kept")))
            return Heard(done, None if worker.replacement else frame.blob)
        case "resumed":
            worker.set_up = worker.resumed = True
            worker.step = int(head["step"])
            return Heard(Resumed(rank, incarnation, int(head["generation"]), t))
        case "fetching":
            worker.fetching_s = int(head["bytes"]) / _SLOWEST_STORAGE
            return None
        case "forgotten":
            why, everyone = str(head.get("why"))[:1000], bool(head.get("everyone"))
            return Heard(Forgotten(rank, incarnation, int(head["generation"]), why, t, everyone))
        case "finished":
            worker.finished = True
            worker.step = int(head["step"])
            return Heard(Finished(rank, incarnation, int(head["generation"]), t))
        case "raised":
            step = head.get("step")
            worker.raised_step = None if step is None else int(step)
            text = str(head["traceback"])[-_MAX_TRACEBACK_CHARS:]
            worker.raised = Raised(1, str(head["kind"]), str(head["message"])[:1000], text, bool(head.get("fatal")))
            return None
        case other:
            raise ValueError(f"a frame of unknown type {other!r}")


def ending(worker: Worker, t: float) -> Exited | Lost:
    """Return what the end of a worker's process means: it left with exit code 0, or it is lost."""
    assert worker.rank is not None
    if worker.process.returncode == 0 and not worker.killed_because:
        return Exited(worker.rank, worker.incarnation, worker.step, t)
    raised, step = worker.raised, worker.step
    if raised is not None:
        step = worker.raised_step
    elif worker.process.returncode is not None and worker.process.returncode > 0 and not worker.set_up:
        # it never came so far as to say what went wrong; a wrong argument or a missing module ends every attempt so
        raised, step = Raised(1, worker.process.why, "it ended before its set-up was complete", ""), None
    return Lost((LostWorker(worker.rank, worker.incarnation, worker.why, step, raised),), t)
