"""What the agent knows of one of its processes: who it is, what it last said, what it needs to be told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrow.agent.health import Judgement, Limits, Vitals, judge
from regrow.agent.link import Link
from regrow.agent.logs import LogPaths
from regrow.agent.options import RunOptions
from regrow.agent.process import Process, cpu_and_state
from regrow.agent.seats import Site
from regrow.agent.world import Raised
from regrow.lifeline import Observer
from regrow.peer.keeper import Keeper
from regrow.rules import Policy, Rules

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "ROLE_RANK", "REGROW_INCARNATION")


@dataclass(eq=False)
class Worker:
    """A process that holds a rank, or a spare (``rank`` is None) that may come to hold one."""

    rank: int | None = None
    local_rank: int = 0
    incarnation: int = 0
    replacement: bool = False
    spare: bool = False
    process: Process = field(init=False)
    link: Link | None = None
    paths: LogPaths | None = None
    pid: int = 0
    assigned: bool = False
    step: int | None = None
    progress: object = None
    waiting: bool = False
    set_up: bool = False
    resumed: bool = False
    finished: bool = False
    raised: Raised | None = None
    raised_step: int | None = None
    killed_because: str = ""
    lifeline: Observer | None = None
    doomed: bool = False
    """It is dying, and that was reported; its process takes down its memory and is not gone yet."""
    stopped: bool = False
    stopped_t: float | None = None
    cpu_ticks: int = -1
    heartbeat_t: float = 0.0
    cpu_t: float = 0.0
    progress_t: float = 0.0
    attempt_t: float = field(default_factory=time.monotonic)
    fetching_s: float = 0.0
    """How long it may take to read the state that it fetches in this attempt."""

    @property
    def why(self) -> str:
        """What ended it, in words."""
        return self.killed_because or self.process.why

    def heard(self, now: float) -> None:
        """Any sign at all starts the clocks anew."""
        self.heartbeat_t = self.cpu_t = self.progress_t = now

    def heartbeat(self, head: dict[str, Any], now: float) -> None:
        """Take in what a heartbeat tells."""
        self.heartbeat_t = now
        self.waiting = bool(head.get("waiting"))
        progress = (head.get("step"), head.get("ops"))
        if progress != self.progress or self.waiting:
            self.progress, self.progress_t = progress, now
        if isinstance(head.get("step"), int):
            self.step = head["step"]

    def watch_lifeline(self, path: object, directory: Path, died: Callable[[Worker], None]) -> None:
        """Let ``died`` be called as soon as its main thread ends, if it holds a lifeline in our own directory."""
        # a worker that a wrapper script started is not the process whose end counts
        if not isinstance(path, str) or self.pid != self.process.pid or Path(path).parent != directory:
            return
        loop = asyncio.get_running_loop()

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the agent has ended meanwhile
                loop.call_soon_threadsafe(died, self)

        with contextlib.suppress(OSError):
            self.lifeline = Observer(Path(path), told)

    def stopped_for(self, now: float) -> float:
        """Return for how long a process that has not said hello has been seen stopped: it has no heartbeat to miss."""
        look = cpu_and_state(self.process.pid)
        if look is None or look[1] not in "Tt":
            self.stopped_t = None
            return 0.0
        if self.stopped_t is None:
            self.stopped_t = now
        return now - self.stopped_t

    def judge(self, now: float, limits: Limits) -> Judgement:
        """Look at the process, then at what it said. Set-up may take as long as it likes."""
        look = cpu_and_state(self.pid)
        if look is not None:
            ticks, state = look
            self.stopped = state in "Tt"
            if ticks != self.cpu_ticks:
                self.cpu_ticks, self.cpu_t = ticks, now
        vitals = Vitals(
            heartbeat_t=self.heartbeat_t,
            cpu_t=self.cpu_t,
            progress_t=self.progress_t if self.set_up else now,
            waiting=self.waiting or self.finished,
            stopped=self.stopped,
        )
        return judge(now, vitals, limits)


def _snapshot_every(options: RunOptions) -> str:
    if options.policy is Policy.COMMIT:  # a commit is a snapshot, of replicated state, too
        return str(options.commit_every)
    return "auto" if options.snapshot_every is None else str(options.snapshot_every)


class Environment:
    """The variables that workers and spares start with: torchrun's, and regrow's own."""

    def __init__(
        self, options: RunOptions, site: Site, socket_path: Path, shared_dir: Path, keeper: Keeper | None
    ) -> None:
        self._shared_dir = shared_dir
        self._common = {
            # the host's own number, also on a standby: what fails together must be seen by it
            "GROUP_RANK": str(site.node),
            "ROLE_NAME": options.role,
            "LOCAL_WORLD_SIZE": str(options.nproc),
            "WORLD_SIZE": str(site.world_size),
            "GROUP_WORLD_SIZE": str(len(site.nprocs)),
            "ROLE_WORLD_SIZE": str(site.world_size),
            "MASTER_ADDR": site.master_addr,
            "MASTER_PORT": str(site.master_port),
            "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
            "TORCHELASTIC_RUN_ID": site.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "REGROW_AGENT": str(socket_path),
            "REGROW_TOKEN": options.token,
            "REGROW_RUN_ID": site.run_id,
            "REGROW_FAILURE_DOMAIN": options.failure_domain,
            "REGROW_JOURNAL_MB": str(options.journal_mb),
            "REGROW_REPLAY_HELPERS": "auto" if options.replay_helpers is None else str(options.replay_helpers),
            "REGROW_SNAPSHOT_EVERY": _snapshot_every(options),
            "REGROW_SCRATCH": str(options.log_dir / "scratch"),
        }
        if keeper is not None:
            self._common["REGROW_KEEPER"] = json.dumps([*keeper.address, str(keeper.directory)])
            self._common["REGROW_SNAPSHOT_COPIES"] = str(options.snapshot_copies)
            if options.snapshot_domain is not None:
                self._common["REGROW_SNAPSHOT_DOMAIN"] = options.snapshot_domain
        if options.ckpt_dir is not None:
            self._common["REGROW_CKPT"] = json.dumps(
                {
                    "url": options.ckpt_dir,
                    "every": options.ckpt_every,
                    "overhead": options.ckpt_overhead,
                    "keep": options.ckpt_keep,
                    "mtbf_s": options.mtbf_s,
                }
            )
        rules = Rules(policy=options.policy, force=options.force_source)
        self._common["REGROW_RULES"] = json.dumps(rules.to_json())
        if options.interface is not None:  # for what the script connects by itself
            self._common["GLOO_SOCKET_IFNAME"] = options.interface
            self._common["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", options.interface)
        if options.slots > 1:
            self._common["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        if options.faults is not None:
            self._common["REGROW_FAULTS"] = options.faults

    def of_rank(self, worker: Worker, local_world_size: int) -> dict[str, str]:
        """What a process with this rank must find in its environment, also if it gets the rank only later."""
        assert worker.paths is not None
        return {
            **self._common,
            "RANK": str(worker.rank),
            "LOCAL_RANK": str(worker.local_rank),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "ROLE_RANK": str(worker.rank),
            "TORCHELASTIC_RESTART_COUNT": str(worker.incarnation),
            "TORCHELASTIC_ERROR_FILE": worker.paths.error_file,
            "REGROW_ROLE": "worker",
            "REGROW_INCARNATION": str(worker.incarnation),
        }

    def of_spare(self, param_bytes: int) -> dict[str, str]:
        """What a spare starts with: no rank, not even one inherited from the agent's own environment."""
        own = {"TORCHELASTIC_RESTART_COUNT": "0", "REGROW_ROLE": "spare", "REGROW_PARAM_BYTES": str(param_bytes)}
        return {**self._common, **own}

    def small_state_path(self, rank: int) -> Path:
        """A file in shared memory that only this rank's worker writes and that outlives it."""
        return self._shared_dir / f"rank{rank}.small"

    @staticmethod
    def complete(own: dict[str, str]) -> dict[str, str]:
        """Add what is inherited from the agent."""
        inherited = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        return {**inherited, **own}
