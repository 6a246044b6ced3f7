"""The user's side: ``init``, the run, its steps."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from regrow import lifeline, testing, wire
from regrow.group import Fabric, Mode
from regrow.ids import Generation
from regrow.run.base import Run
from regrow.run.copies import Host
from regrow.run.environment import Environment, read_environment
from regrow.run.link import Link
from regrow.run.plain import init_plain
from regrow.run.protected import ProtectedRun
from regrow.run.stages import Place
from regrow.run.step import Step
from regrow.run.store import AgentStore
from regrow.run.warm import warm_up

__all__ = ["Run", "Step", "init"]

DEFAULT_TIMEOUT = timedelta(minutes=30)


def init(backend: str | None = None, *, timeout: timedelta = DEFAULT_TIMEOUT) -> Run:
    """Join the job: instead of ``torch.distributed.init_process_group``.

    Under ``regrow run`` every process group made from here on heals in place. In a warm spare this call waits until a
    rank is free. Started in any other way, the script runs as it always did, unprotected, and says so once.

    Args:
        backend: for unprotected runs, as in ``init_process_group``; a protected run uses gloo for host memory and nccl
            for GPUs.
        timeout: how long a collective may take, as in ``init_process_group``.
    """
    if dist.is_initialized():
        raise ValueError("regrow.init() replaces dist.init_process_group(): call it instead, and only once")
    environment = read_environment()
    if environment.agent is None:
        return init_plain(backend=backend, timeout=timeout, torchrun=environment.torchrun)
    if backend not in (None, "regrow"):
        raise ValueError(f"regrow.init(backend={backend!r}): under `regrow run` the backend is 'regrow'; leave it out")
    return _init_protected(environment, environment.agent, timeout)


def _init_protected(environment: Environment, agent: str, timeout: timedelta) -> Run:
    if environment.spare:
        warm_up(environment.param_bytes)  # before the hello: a spare that says it is ready must be
    link = Link(
        agent,
        {
            "type": "hello",
            "token": environment.token,
            "role": "spare" if environment.spare else "worker",
            "pid": os.getpid(),
            "rank": environment.rank,
            "lifeline": lifeline.hold(Path(agent).parent),
            "incarnation": environment.incarnation,
        },
    )
    assigned = link.wait_assignment()
    head = assigned.head
    _take_identity(assigned)
    rank, world_size = int(head["rank"]), int(head["world_size"])
    replacement = bool(head["replacement"])
    faults = os.environ.get("REGROW_FAULTS")
    if faults:
        marks = Path(head["small_state_path"]).parent / "faults"
        testing.install(testing.Injector(testing.decode(faults), rank=rank, marks_dir=marks))
    store = AgentStore(link)
    fabric = Fabric(
        rank=rank,
        world_size=world_size,
        generation=int(head["generation"]),
        store=store,
        host_addr=head["host_addr"],
        timeout=timeout,
        mode=Mode.REPLAYING if replacement else Mode.RECORDING,
        record=assigned.blob if replacement else None,
    )
    fabric.install()
    link.watch(Generation(int(head["generation"])), float(head["dead_after_s"]))
    run = ProtectedRun(
        rank=rank,
        world_size=world_size,
        link=link,
        fabric=fabric,
        replacement=replacement,
        small_state_path=Path(head["small_state_path"]),
        dead_after_s=float(head["dead_after_s"]),
        place=Place(
            host_addr=head["host_addr"],
            token=environment.token,
            node=environment.node,
            failure_domain=environment.failure_domain,
            scratch=Path(environment.scratch),
            journal_bytes=environment.journal_mb << 20,
            replay_helpers=environment.replay_helpers,
            ranks_here=environment.ranks_here,
            host=_host(environment),
            snapshot_every=environment.snapshot_every,
            ckpt=environment.ckpt,
            rules=environment.rules,
        ),
    )
    dist.init_process_group("regrow", store=store, rank=rank, world_size=world_size, timeout=timeout)
    if replacement:
        testing.point("replacement_setup")
    return run


def _host(environment: Environment) -> Host | None:
    if environment.keeper is None:
        return None
    address, port, directory = environment.keeper
    return Host(
        node=environment.node,
        keeper=(address, port),
        kept=Path(directory),
        copies=environment.snapshot_copies,
        domain=environment.snapshot_domain,
    )


def _take_identity(assigned: wire.Frame) -> None:
    """Become the rank that the agent gave: its environment, and its log files if there are any."""
    os.environ.update(assigned.head.get("env", {}))
    for number, name in ((1, "stdout"), (2, "stderr")):
        path = assigned.head.get(name)
        if path:
            (sys.stdout if number == 1 else sys.stderr).flush()
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, number)
            os.close(target)
