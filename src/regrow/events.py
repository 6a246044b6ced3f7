"""The record of what happened in a run: one JSON object per line, one file per node.

Every transition is written here by the agents and read from here by the report. Nothing decides anything from it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Appends events to one node's file. Every line is written at once: the next thing that happens may be the end.

    A disk that is full costs events, and that is said; those that fit later are written again.
    """

    def __init__(self, directory: Path, node: int, run_id: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._common = {"run": run_id, "node": node}
        self._file = (directory / f"events.{node}.jsonl").open("ab", buffering=0)
        self._torn = False

    def append(self, event: str, **fields: Any) -> None:
        """Write one event; ``t`` (seconds since the epoch) is now unless it is given."""
        line = {"t": time.time(), "event": event, **self._common, **fields}
        if self._file.closed:
            return
        data = ("\n" * self._torn + json.dumps(line, default=str) + "\n").encode()
        try:
            whole = self._file.write(data) == len(data)
        except OSError as error:
            whole = False
            if not self._torn:
                print(f"[regrow] {self._file.name}: {error}: events are missing from here on", file=sys.stderr)
        self._torn = not whole  # training must not end for want of a place to write about it

    def close(self) -> None:
        """Close the file; later events are dropped."""
        self._file.close()


def read(where: Path | str) -> list[dict[str, Any]]:
    """Return all nodes' events by time, or those of one file. A last line that was torn by a crash is left out."""
    events: list[dict[str, Any]] = []
    for path in [Path(where)] if Path(where).is_file() else sorted(Path(where).glob("events.*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict) and "event" in event and isinstance(event.get("t"), int | float):
                events.append(event)
    return sorted(events, key=lambda event: event["t"])
