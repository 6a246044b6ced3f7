"""Tells the agent of an exception that ends this worker, so that a bug is not taken for a fault for ever.

Only tells: the exception goes on as it would, except that the agent says a misuse of regrow in its place.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from regrow.errors import RegrowError
from regrow.run.link import Link


def report_to(link: Link, step: Callable[[], int | None]) -> None:
    """From now on, tell the agent of what nobody has caught. ``step``: which one is in progress."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        misuse = _is_misuse(error, trace)
        link.send(
            {
                "type": "raised",
                "step": step(),
                "kind": kind.__name__,
                "message": str(error)[:2000],
                "traceback": "" if misuse else text[-20000:],
                "fatal": misuse or isinstance(error, RegrowError),
            }
        )
        if not misuse:  # the agent says it, in one sentence and once
            before(kind, error, trace)

    sys.excepthook = report


def _is_misuse(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether regrow itself refused what it was given: that needs a sentence, not a traceback, and no second try."""
    if not isinstance(error, ValueError):
        return False
    last = None
    for frame, _ in traceback.walk_tb(trace):
        last = frame.f_globals.get("__name__", "")
    return last is not None and last.split(".")[0] == "regrow"
