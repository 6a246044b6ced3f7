"""Where workers' output goes, in torchrun's own scheme: ``attempt_<incarnation>/<local rank>/stdout.log`` and so on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from regrow.agent.options import RunOptions


@dataclass(frozen=True)
class LogPaths:
    """One incarnation's files; an empty string is the agent's own stream."""

    stdout: str
    stderr: str
    error_file: str


class Logs:
    """Hands out log files and copies the teed ones to the console. Its tailing threads end with ``stop``."""

    def __init__(self, options: RunOptions, run_id: str) -> None:
        self._slots = options.slots
        self._role = options.role
        self._run_id = run_id
        self._specs = DefaultLogsSpecs(
            log_dir=str(options.log_dir),
            redirects=Std.from_str(options.redirects),
            tee=Std.from_str(options.tee),
            local_ranks_filter=set(options.local_ranks) if options.local_ranks is not None else None,
        )
        self._attempts: dict[int, LogsDest] = {}
        self._tails: dict[LogPaths, list[TailLog]] = {}

    def paths(self, local_rank: int, incarnation: int) -> LogPaths:
        """Return the files of one incarnation of a rank, and begin to tee them if that was asked for."""
        dest = self._attempts.get(incarnation)
        if dest is None:
            # torchrun makes an attempt's directory for all ranks at once; here a rank may be alone in it
            common = {"TORCHELASTIC_RUN_ID": self._run_id, "TORCHELASTIC_RESTART_COUNT": str(incarnation)}
            dest = self._specs.reify({rank: dict(common) for rank in range(self._slots)})
            self._attempts[incarnation] = dest
        paths = LogPaths(dest.stdouts[local_rank], dest.stderrs[local_rank], dest.error_files[local_rank])
        for files, stream in ((dest.tee_stdouts, sys.stdout), (dest.tee_stderrs, sys.stderr)):
            if (path := files.get(local_rank)) is not None:
                Path(path).touch()
                self._tails.setdefault(paths, []).append(TailLog(self._role, {local_rank: path}, stream).start())
        return paths

    def retire(self, paths: LogPaths) -> None:
        """Copy what is left of one incarnation's output, end its threads. Blocks a little: not for the event loop."""
        for tail in self._tails.pop(paths, ()):
            tail.stop()

    def stop(self) -> None:
        """Retire all."""
        for paths in list(self._tails):
            self.retire(paths)
