"""Reads the environment, once and in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from regrow.rules import Rules
from regrow.run.checkpointing import Checkpointing


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the launcher told this process."""

    agent: str | None
    """Path of the agent's socket; ``None`` when the script was not started by ``regrow run``."""
    token: str
    spare: bool
    rank: int | None
    incarnation: int
    param_bytes: int
    """Size of the model that a spare should get ready for; 0 if not known."""
    failure_domain: str
    """What fails together: ``host``, ``rank``, or groups of ranks."""
    scratch: str
    """A directory on this host's disk for what memory does not hold."""
    journal_mb: int
    """How much memory a rank's journal may take."""
    replay_helpers: int | None
    """How many idle ranks help with a replay; ``None``: as many as make it faster."""
    keeper: tuple[str, int, str] | None
    """Where this host's agent keeps other hosts' snapshots: address, and directory; ``None``: there is one host."""
    snapshot_copies: int
    """How many hosts keep each snapshot, the rank's own included."""
    snapshot_every: int | None
    """After how many steps another one is taken; ``None``: as often as the network allows."""
    snapshot_domain: str | None
    """What this host fails together with; ``None``: it fails by itself."""
    ckpt: Checkpointing | None
    """Where checkpoints of the whole job go to; ``None``: there are none."""
    rules: Rules
    """What was said of how a loss is met."""
    node: int
    ranks_here: int
    """How many ranks this host has."""
    torchrun: bool
    """Whether rank and world size are there, so that a process group can be made without an agent."""


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return what the launcher set."""
    rank = environ.get("RANK")
    return Environment(
        agent=environ.get("REGROW_AGENT"),
        token=environ.get("REGROW_TOKEN", ""),
        spare=environ.get("REGROW_ROLE") == "spare",
        rank=None if rank is None else int(rank),
        incarnation=int(environ.get("REGROW_INCARNATION", "0")),
        param_bytes=int(environ.get("REGROW_PARAM_BYTES", "0")),
        failure_domain=environ.get("REGROW_FAILURE_DOMAIN", "host"),
        scratch=environ.get("REGROW_SCRATCH", "."),
        journal_mb=int(environ.get("REGROW_JOURNAL_MB", "256")),
        replay_helpers=_number(environ.get("REGROW_REPLAY_HELPERS", "auto")),
        keeper=_keeper(environ.get("REGROW_KEEPER")),
        snapshot_copies=int(environ.get("REGROW_SNAPSHOT_COPIES", "1")),
        snapshot_every=_number(environ.get("REGROW_SNAPSHOT_EVERY", "auto")),
        snapshot_domain=environ.get("REGROW_SNAPSHOT_DOMAIN"),
        ckpt=_checkpointing(environ.get("REGROW_CKPT")),
        rules=_rules(environ.get("REGROW_RULES")),
        node=int(environ.get("GROUP_RANK", "0")),
        ranks_here=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        torchrun=all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
    )


def _number(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _checkpointing(text: str | None) -> Checkpointing | None:
    return None if text is None else Checkpointing(**json.loads(text))


def _rules(text: str | None) -> Rules:
    return Rules() if text is None else Rules.from_json(json.loads(text))


def _keeper(text: str | None) -> tuple[str, int, str] | None:
    if text is None:
        return None
    host, port, directory = json.loads(text)
    return str(host), int(port), str(directory)
