"""What one ``regrow run`` was asked to do: checked once, then frozen."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from regrow.rules import Policy, Source


class StartError(Exception):
    """The run cannot start; the message is the one sentence that the user gets to see."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of ``regrow run`` in the agent's own terms. ``ValueError`` explains what cannot be."""

    command: tuple[str, ...]
    token: str
    log_dir: Path
    nproc: int = 1
    nnodes: int = 1
    """How many hosts the world is made of."""
    max_nodes: int | None = None
    """How many hosts may be there without ``standby``; those that are more wait for a loss."""
    standby: bool = False
    max_slots: int | None = None
    node_rank: int | None = None
    endpoint: tuple[str, int] | None = None
    store: tuple[tuple[str, int], ...] = ()
    """The members of the etcd cluster to use; none: the first agent hosts the store."""
    store_timeout_s: float = 10.0
    """So long may the store be away, and so long a node without the others taking it for lost."""
    join_timeout_s: float = 300.0
    run_id: str = ""
    role: str = "default"
    max_restarts: int = 100
    spares: int = 0
    dead_after_s: float = 5.0
    stuck_after_s: float = 600.0
    grace_s: float = 5.0
    redirects: str = "0"
    tee: str = "0"
    local_ranks: frozenset[int] | None = None
    host_addr: str | None = None
    """Where everything on this host listens; ``None``: loopback on one host, the way to the store on several."""
    interface: str | None = None
    """The interface that was asked for by name: nothing may listen elsewhere."""
    master_port: int | None = None
    faults: str | None = None
    failure_domain: str = "host"
    journal_mb: int = 256
    snapshot_copies: int = 2
    """How many hosts keep each snapshot of sharded state, the rank's own included."""
    snapshot_every: int | None = None
    """After how many steps sharded state is snapshot again; ``None``: as often as the network allows."""
    snapshot_domain: str | None = None
    """What this host fails together with; ``None``: it fails by itself."""
    replay_helpers: int | None = None
    """How many idle ranks help with a replay; ``None``: as many as make it faster."""
    ckpt_dir: str | None = None
    """Where checkpoints of the whole job are written to; ``None``: there are none."""
    ckpt_every: int | None = None
    """After how many steps; ``None``: as often as ``ckpt_overhead`` allows."""
    ckpt_overhead: float = 0.035
    ckpt_keep: int = 2
    mtbf_s: float | None = None
    policy: Policy = Policy.LADDER
    commit_every: int = 10
    """With ``Policy.COMMIT``: after how many steps the state is copied again."""
    force_source: Source | None = None
    """Where lost state must come from; ``None``: from where it comes soonest."""
    forked: bool = False
    """Whether workers are forked from a process that has imported PyTorch already."""

    def __post_init__(self) -> None:
        if self.nproc < 1:
            raise ValueError(f"--nproc-per-node must be at least 1, got {self.nproc}")
        if self.nnodes < 1:
            raise ValueError(f"--nnodes must be at least 1, got {self.nnodes}")
        if self.most_nodes < self.nnodes:
            raise ValueError(f"--nnodes MIN:MAX: MAX is less than MIN, got {self.nnodes}:{self.most_nodes}")
        if self.slots < self.nproc:
            raise ValueError(f"--slots {self.slots} is less than --nproc-per-node {self.nproc}")
        if self.standby and self.node_rank is not None:
            raise ValueError("--standby and --node-rank cannot be used together: a standby is given its number")
        if self.node_rank is not None and not 0 <= self.node_rank < self.most_nodes:
            raise ValueError(f"--node-rank must lie between 0 and {self.most_nodes - 1}, got {self.node_rank}")
        if self.max_restarts < 0:
            raise ValueError(f"--max-restarts must not be negative, got {self.max_restarts}")
        if self.spares < 0:
            raise ValueError(f"--spares must not be negative, got {self.spares}")
        for flag, seconds in (("--dead-after", self.dead_after_s), ("--stuck-after", self.stuck_after_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{flag} must be a positive number of seconds, got {seconds}")
        if self.stuck_after_s < self.dead_after_s:
            raise ValueError(f"--stuck-after {self.stuck_after_s:g} is shorter than --dead-after {self.dead_after_s:g}")
        if self.snapshot_copies < 1:
            raise ValueError(f"--snapshot-copies must be at least 1 (the rank's own host), got {self.snapshot_copies}")
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise ValueError(f"--snapshot-every must be at least 1 step, or auto, got {self.snapshot_every}")
        if self.ckpt_every is not None and self.ckpt_every < 1:
            raise ValueError(f"--ckpt-every must be at least 1 step, or auto, got {self.ckpt_every}")
        if not 0 < self.ckpt_overhead < 1:
            raise ValueError(f"--ckpt-overhead must be a part of the time, like 3.5%, got {self.ckpt_overhead:.4g}")
        if self.ckpt_keep < 1:
            raise ValueError(f"--ckpt-keep must be at least 1, got {self.ckpt_keep}")
        if self.mtbf_s is not None and not (math.isfinite(self.mtbf_s) and self.mtbf_s > 0):
            raise ValueError(f"--mtbf must be a time, like 4h, got {self.mtbf_s}")
        if self.policy in (Policy.CHECKFREQ, Policy.RESTART) and self.ckpt_dir is None:
            raise ValueError(
                f"--policy {self.policy.value} goes back to checkpoints on storage: say where with --ckpt-dir"
            )
        if self.policy is Policy.COMMIT and self.snapshot_every is not None:
            raise ValueError("--policy commit copies the state every --commit-every steps: leave out --snapshot-every")
        if self.policy is not Policy.LADDER and self.force_source is not None:
            raise ValueError(
                f"--policy {self.policy.value} says where state comes from: --force-source is for --policy ladder"
            )
        if self.commit_every < 1:
            raise ValueError(f"--commit-every must be at least 1 step, got {self.commit_every}")
        if self.snapshot_domain is not None and not re.fullmatch(r"[\w.:@+/ -]{1,100}", self.snapshot_domain):
            raise ValueError(
                f"--snapshot-domain must be a name of letters, digits and . : @ + / _ -, got {self.snapshot_domain!r}"
            )
        if not (math.isfinite(self.store_timeout_s) and self.store_timeout_s >= 2):
            raise ValueError(f"--store-timeout must be at least 2 seconds, got {self.store_timeout_s}")
        if self.store and not self.alone and not self.run_id:
            raise ValueError("--store with several nodes needs --rdzv-id, the same on all: it names the run's keys")
        if self.journal_mb < 1:
            raise ValueError(f"--journal-memory must be at least 1 MB, got {self.journal_mb}")
        if not re.fullmatch(r"host|rank|\d+(-\d+)?(,\d+(-\d+)?)*", self.failure_domain):
            raise ValueError(
                f"--failure-domain must be host, rank, or groups of ranks like 0-1,2,3-5; got {self.failure_domain!r}"
            )
        if not (math.isfinite(self.join_timeout_s) and self.join_timeout_s > 0):
            raise ValueError(f"join_timeout must be a positive number of seconds, got {self.join_timeout_s}")
        if self.run_id and not re.fullmatch(r"[\w.:@+-]{1,100}", self.run_id):
            raise ValueError(f"--rdzv-id may hold letters, digits and . : @ + _ - only, got {self.run_id!r}")

    @property
    def most_nodes(self) -> int:
        """How many hosts may be there without ``standby``."""
        return self.nnodes if self.max_nodes is None else self.max_nodes

    @property
    def slots(self) -> int:
        """How many ranks this host can hold at most."""
        return self.nproc if self.max_slots is None else self.max_slots

    @property
    def alone(self) -> bool:
        """No other host can ever be there."""
        return self.most_nodes == 1 and not self.standby
