"""Read the command line of ``regrow run``; each limit is said in one sentence.

This is the one place that reads the agent's environment.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from regrow.agent import flags, torchrun
from regrow.agent.interfaces import addresses, choose
from regrow.agent.options import RunOptions
from regrow.rules import Policy, Source

_C10D_PORT = 29400
_STATIC_PORT = 29500
_ETCD_PORT = 2379


def _replay_helpers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"--replay-helpers must be auto or a number from 0 on, got {text!r}")
    return int(text)


def parse(argv: list[str]) -> RunOptions:
    """Return the checked options; what the user got wrong ends in one sentence on stderr and exit code 2."""
    made = flags.parser()
    args = made.parse_args(argv)
    for sentence in torchrun.refusals(args):
        made.error(sentence)
    if args.monitor_interval != made.get_default("monitor_interval"):
        print("regrow run: --monitor-interval has no effect: deaths are noticed at once", file=sys.stderr)
    try:
        return _options(args)
    except (ValueError, OSError) as error:
        made.error(str(error))


def _options(args: argparse.Namespace) -> RunOptions:
    nnodes, most = _nnodes(args.nnodes)
    several = most > 1 or args.standby
    if args.rdzv_backend not in ("static", "c10d"):
        raise ValueError(f"--rdzv-backend {args.rdzv_backend} is not supported: static and c10d are")
    try:
        nproc = torchrun.local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--nproc-per-node: {error}") from None
    if args.standalone and several:
        raise ValueError(f"--standalone is for one node, got {'--standby' if most == 1 else f'--nnodes {args.nnodes}'}")
    try:
        conf = torchrun.rendezvous_conf(args.rdzv_conf)
        join_timeout_s = float(conf.pop("join_timeout", 300.0))
        node_rank = conf.pop("rank", args.node_rank)
    except ValueError as error:
        raise ValueError(f"--rdzv-conf: {error}") from None
    for flag in ("redirects", "tee"):
        try:
            torchrun.streams(getattr(args, flag))
        except ValueError as error:
            raise ValueError(f"--{flag}: {error}") from None
    if args.start_method == "fork":
        raise ValueError("--start-method fork is not supported: forkserver and spawn are")
    command = _command(args)
    options = RunOptions(
        command=command,
        token=_token(args, several=several),
        log_dir=Path(),
        nproc=nproc,
        max_slots=args.slots,
        nnodes=nnodes,
        max_nodes=most,
        standby=args.standby,
        node_rank=None if node_rank is None else int(node_rank),
        endpoint=_endpoint(args) if several else None,
        store=_store(args.store),
        store_timeout_s=args.store_timeout,
        join_timeout_s=join_timeout_s,
        run_id="" if args.rdzv_id == "none" or args.standalone else args.rdzv_id,
        role=args.role,
        max_restarts=args.max_restarts,
        spares=args.spares,
        dead_after_s=args.dead_after,
        stuck_after_s=args.stuck_after,
        grace_s=float(args.shutdown_timeout),
        redirects=args.redirects,
        tee=args.tee,
        local_ranks=_local_ranks(args.local_ranks_filter),
        host_addr=choose(
            addresses(),
            interface=args.interface,
            host_addr=args.host_addr,
            local_addr=args.local_addr,
            gloo_interfaces=os.environ.get("GLOO_SOCKET_IFNAME", ""),
        ),
        interface=args.interface,
        master_port=None if args.standalone else _master_port(args),
        faults=args.inject,
        failure_domain=args.failure_domain,
        journal_mb=args.journal_memory,
        snapshot_copies=args.snapshot_copies,
        snapshot_every=args.snapshot_every,
        snapshot_domain=args.snapshot_domain,
        replay_helpers=_replay_helpers(args.replay_helpers),
        ckpt_dir=_ckpt_dir(args.ckpt_dir),
        ckpt_every=args.ckpt_every,
        ckpt_overhead=args.ckpt_overhead,
        ckpt_keep=args.ckpt_keep,
        mtbf_s=args.mtbf,
        policy=Policy(args.policy),
        commit_every=args.commit_every,
        force_source=None if args.force_source is None else Source(args.force_source),
        # another interpreter, or a program around it, is to be started for every worker
        forked=args.start_method == "forkserver" and not args.no_python and command[0] == sys.executable,
    )
    return replace(options, log_dir=_log_dir(args.log_dir))  # made last: nothing is left behind by a wrong command line


def _ckpt_dir(given: str | None) -> str | None:
    if given is None or "://" in given:
        return given
    path = Path(given).expanduser().absolute()  # workers may change their directory
    if path.exists() and not path.is_dir():
        raise ValueError(f"--ckpt-dir {given} is not a directory")
    return str(path)


def _nnodes(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        return int(low), int(high or low)
    except ValueError:
        raise ValueError(f"--nnodes must be N or MIN:MAX, got {text!r}") from None


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    script, rest = args.training_script, tuple(args.training_script_args)
    if args.no_python:
        if args.module:
            raise ValueError("--no-python and --module cannot be used together")
        if shutil.which(script) is None:
            raise ValueError(f"cannot execute {script!r}: no such program")
        return (script, *rest)
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    if args.module:
        return (python, "-u", "-m", script, *rest)
    if not Path(script).exists():
        raise ValueError(f"no such script: {script}")
    return (python, "-u", script, *rest)


def _token(args: argparse.Namespace, *, several: bool) -> str:
    if args.token_file is not None:
        token = Path(args.token_file).read_text(encoding="utf-8").strip()
        if not token:
            raise ValueError(f"--token-file {args.token_file} is empty")
        if Path(args.token_file).stat().st_mode & 0o077:
            print(
                f"regrow run: warning: --token-file {args.token_file} can be read by other users: chmod 600 it",
                file=sys.stderr,
            )
        return token
    token = os.environ.get("REGROW_TOKEN", "")
    if token:
        return token
    if several:
        raise ValueError(
            "with more than one node every agent needs the same secret: set REGROW_TOKEN or give --token-file"
        )
    return secrets.token_hex(16)


def _log_dir(given: str | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="regrow_logs_"))
    path = Path(given)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--log-dir {given} is not a directory")
    path.mkdir(parents=True, exist_ok=True)
    return path.absolute()


def _store(url: str) -> tuple[tuple[str, int], ...]:
    if not url:
        return ()
    scheme, _, members = url.partition("://")
    if scheme == "etcds":
        raise ValueError("--store etcds:// is not supported yet: use etcd:// in a network that you trust")
    if scheme != "etcd" or not members:
        raise ValueError(f"--store must be etcd://HOST:PORT,HOST:PORT,..., got {url!r}")
    if "@" in members:
        raise ValueError("--store with a user and password is not supported yet: use an etcd without authentication")
    return tuple(_host_port(member, _ETCD_PORT, url) for member in members.rstrip("/").split(","))


def _host_port(text: str, default: int, url: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"--store must be etcd://HOST:PORT,HOST:PORT,..., got {url!r}")
    return host.strip("[]"), int(port)


def _endpoint(args: argparse.Namespace) -> tuple[str, int]:
    if not args.rdzv_endpoint:
        return _one_host(
            args.master_addr.strip("[]"), "--master-addr"
        ), _STATIC_PORT if args.master_port is None else args.master_port
    host, colon, port = args.rdzv_endpoint.rpartition(":")
    if not colon or args.rdzv_endpoint.endswith("]"):
        host, port = args.rdzv_endpoint, str(_C10D_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"--rdzv-endpoint must be HOST:PORT with a port that all nodes know, got {args.rdzv_endpoint!r}"
        )
    return _one_host(host.strip("[]"), "--rdzv-endpoint"), int(port)


def _one_host(host: str, flag: str) -> str:
    if host in ("0.0.0.0", "::", "*"):
        raise ValueError(f"{flag} {host} would be all addresses: name the one at which the other nodes reach node 0")
    return host


def _master_port(args: argparse.Namespace) -> int | None:
    port: Any = args.master_port
    if port is None and args.rdzv_endpoint:
        text = args.rdzv_endpoint.rpartition(":")[2]
        port = int(text) if text.isdigit() else None
    if port is not None and not 0 <= port < 65536:
        raise ValueError(f"--master-port must lie between 0 and 65535, got {port}")
    return port or None


def _local_ranks(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--local-ranks-filter must be a list like 0,1,2, got {text!r}") from None
