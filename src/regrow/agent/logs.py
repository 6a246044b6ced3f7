"""Where workers' output goes, in torchrun's own scheme: ``attempt_<incarnation>/<local rank>/stdout.log`` and so on."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from regrow.agent.options import RunOptions
from regrow.agent.torchrun import Streams, streams

_LOOK_EVERY_S = 0.1
_ENDED_WITHIN_S = 10.0


@dataclass(frozen=True)
class LogPaths:
    """One incarnation's files; an empty string is the agent's own stream."""

    stdout: str
    stderr: str
    error_file: str


class Tail:
    """Copies what is added to a file, line by line, in a thread of its own that ends with ``stop``."""

    def __init__(self, path: Path, header: str, to: TextIO) -> None:
        self._path = path
        self._header = header
        self._to = to
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name=f"regrow-tail-{path.parent.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Copy what is left, a last line without an end included."""
        self._ended.set()
        self._thread.join(_ENDED_WITHIN_S)

    def _copy(self) -> None:
        begun = ""
        with self._path.open(encoding="utf-8", errors="replace") as file:
            while True:
                last = self._ended.is_set()  # asked before reading: what was written until then is read
                *lines, begun = (begun + file.read()).split("\n")
                if last and begun:
                    lines.append(begun)
                if lines:
                    self._to.write("".join(f"{self._header}{line}\n" for line in lines))
                    self._to.flush()
                if last:
                    return
                self._ended.wait(_LOOK_EVERY_S)


class Logs:
    """Hands out log files and copies the teed ones to the console. Its tailing threads end with ``stop``."""

    def __init__(self, options: RunOptions, run_id: str) -> None:
        self._options = options
        self._tee = streams(options.tee)
        self._redirects = streams(options.redirects)
        self._directory = Path(tempfile.mkdtemp(prefix=f"{run_id}_", dir=options.log_dir))
        self._tails: dict[LogPaths, list[Tail]] = {}

    def paths(self, local_rank: int, incarnation: int) -> LogPaths:
        """Return the files of one incarnation of a rank, and begin to tee them if that was asked for."""
        directory = self._directory / f"attempt_{incarnation}" / str(local_rank)
        directory.mkdir(parents=True, exist_ok=True)
        shown = self._options.local_ranks is None or local_rank in self._options.local_ranks
        tee = self._tee(local_rank)
        files, tails = {}, []
        for stream, name, console in ((Streams.OUT, "stdout", sys.stdout), (Streams.ERR, "stderr", sys.stderr)):
            path = directory / f"{name}.log"
            if (tee | self._redirects(local_rank)) & stream:
                path.touch()
                files[stream] = str(path)
            else:
                files[stream] = "" if shown else os.devnull
            if tee & stream and shown:
                tails.append(Tail(path, f"[{self._options.role}{local_rank}]:", console))
        paths = LogPaths(files[Streams.OUT], files[Streams.ERR], str(directory / "error.json"))
        if tails:
            self._tails[paths] = tails
        return paths

    def retire(self, paths: LogPaths) -> None:
        """Copy what is left of one incarnation's output, end its threads. Blocks a little: not for the event loop."""
        for tail in self._tails.pop(paths, ()):
            tail.stop()

    def stop(self) -> None:
        """Retire all."""
        for paths in list(self._tails):
            self.retire(paths)
