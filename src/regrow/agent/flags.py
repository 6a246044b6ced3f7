"""The command line of ``regrow run``: torchrun's own parser and our flags; each limit is said in one sentence.

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

from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import determine_local_world_size, get_args_parser

from regrow.agent.interfaces import addresses, choose
from regrow.agent.options import RunOptions
from regrow.rules import Policy, Source

_REFUSED = {
    "run_path": "--run-path is not supported: give the script itself",
    "logs_specs": "--logs-specs is not supported: use --log-dir, --redirects and --tee",
    "numa_binding": "--numa-binding is not supported: start the workers under numactl with --no-python",
    "virtual_local_rank": "--virtual-local-rank is not supported: choose the device by LOCAL_RANK",
    "duplicate_stdout_filters": "--duplicate-stdout-filters is not supported: use --tee",
    "duplicate_stderr_filters": "--duplicate-stderr-filters is not supported: use --tee",
    "signals_to_handle": "--signals-to-handle is not supported: SIGTERM, SIGINT and SIGHUP end the job",
    "event_log_handler": "--event-log-handler is not supported: read events.*.jsonl in --log-dir",
}
_DEFAULTS = {"max_restarts": 100, "node_rank": None, "shutdown_timeout": 5, "start_method": "forkserver"}
_C10D_PORT = 29400
_STATIC_PORT = 29500
_ETCD_PORT = 2379


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser extended by regrow's flags."""
    made = get_args_parser()
    made.prog = "regrow run"
    made.allow_abbrev = False  # or a script's own --virtual would be refused as one of several of these
    made.usage = "regrow run [options] training_script [its arguments]"
    made.description = "Start a training script on this host; replace only the workers that die."
    made.set_defaults(**{name: value for name, value in _DEFAULTS.items() if f"PET_{name.upper()}" not in os.environ})
    ours = made.add_argument_group("regrow")
    ours.add_argument("--spares", type=int, default=0, metavar="N", help="Warm standby processes on this node.")
    ours.add_argument(
        "--dead-after",
        "--dead_after",
        type=float,
        default=5.0,
        metavar="S",
        help="A silent worker, or host, is dead after S seconds. Give the same on all hosts.",
    )
    ours.add_argument(
        "--standby",
        action="store_true",
        help="This host holds no ranks at first; it takes over those of a host that is lost. The number of workers "
        "stays what it was. With --nnodes MIN:MAX the world is made of the first MIN hosts, and hosts that come after "
        "them, up to MAX in all, are standbys without this flag.",
    )
    ours.add_argument(
        "--slots",
        type=int,
        default=None,
        metavar="N",
        help="How many workers this host can hold at most, if it has to take over some of a lost host's "
        "(default: --nproc-per-node).",
    )
    ours.add_argument(
        "--stuck-after",
        "--stuck_after",
        type=float,
        default=600.0,
        metavar="S",
        help="A worker that makes no progress, though it does not wait for others, is replaced after S seconds.",
    )
    ours.add_argument(
        "--store",
        default="",
        metavar="URL",
        help="etcd://HOST:PORT,HOST:PORT,...: keep the run's membership in etcd instead of in the first agent.",
    )
    ours.add_argument(
        "--store-timeout",
        "--store_timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="With --store: so long a request may take, while etcd chooses another leader for instance.",
    )
    ours.add_argument(
        "--interface",
        metavar="NAME",
        help="The network interface that everything listens at, and that state is transferred over (default: loopback "
        "on one host; on several, the one that leads to the rendezvous).",
    )
    ours.add_argument(
        "--host-addr",
        "--host_addr",
        metavar="ADDR",
        help="The same by address, the one at which other hosts reach this one (also: --local-addr).",
    )
    ours.add_argument(
        "--token-file", "--token_file", metavar="FILE", help="File with the run's secret (instead of REGROW_TOKEN)."
    )
    ours.add_argument(
        "--failure-domain",
        "--failure_domain",
        default="host",
        metavar="WHAT",
        help="What fails together: host, rank, or groups of ranks like 0-1,2-3. Pipelines journal what leaves it.",
    )
    ours.add_argument(
        "--journal-memory",
        "--journal_memory",
        type=int,
        default=256,
        metavar="MB",
        help="Memory of each rank's journal; what does not fit goes to the log directory's disk.",
    )
    ours.add_argument(
        "--snapshot-copies",
        "--snapshot_copies",
        type=int,
        default=2,
        metavar="M",
        help="How many hosts keep each snapshot of sharded state in their memory, the rank's own included.",
    )
    ours.add_argument(
        "--snapshot-every",
        "--snapshot_every",
        type=lambda text: None if text == "auto" else int(text),
        default=None,
        metavar="N",
        help="Take a snapshot of sharded state every N steps; auto (the default): every step, or as often as the "
        "network can take them to other hosts beside the training.",
    )
    ours.add_argument(
        "--snapshot-domain",
        "--snapshot_domain",
        default=None,
        metavar="NAME",
        help="What this host fails together with: a rack, a switch. Snapshots are kept in different ones where that is "
        "possible (default: each host fails by itself).",
    )
    ours.add_argument(
        "--ckpt-dir",
        "--ckpt_dir",
        metavar="URL",
        help="Write checkpoints of the whole job there (a directory, or s3://, gs://, ...), in the format of "
        "torch.distributed.checkpoint; a run that finds one there goes on from it.",
    )
    ours.add_argument(
        "--ckpt-every",
        "--ckpt_every",
        type=lambda text: None if text == "auto" else int(text),
        default=None,
        metavar="N",
        help="Write one every N steps; auto (the default): as often as --ckpt-overhead allows.",
    )
    ours.add_argument(
        "--ckpt-overhead",
        "--ckpt_overhead",
        type=_share,
        default=0.035,
        metavar="P%",
        help="What checkpoints may cost: a part of the time (3.5%%).",
    )
    ours.add_argument(
        "--ckpt-keep", "--ckpt_keep", type=int, default=2, metavar="N", help="How many checkpoints are kept (2)."
    )
    ours.add_argument(
        "--mtbf",
        type=_duration,
        default=None,
        metavar="TIME",
        help="The mean time between failures, like 4h: checkpoints are not written more often than is worth it.",
    )
    ours.add_argument(
        "--policy",
        choices=[policy.value for policy in Policy],
        default=Policy.LADDER.value,
        help="How a loss is met. ladder (the default): by whatever brings the job back soonest. The others are there "
        "to compare with, and keep nothing that they do not use. checkfreq: everyone loads the newest checkpoint of "
        "--ckpt-dir. commit: everyone takes the copy that was made in memory every --commit-every steps, while "
        "training stood still. restart: all workers are killed, and start from --ckpt-dir, --max-restarts times at "
        "most.",
    )
    ours.add_argument(
        "--commit-every",
        "--commit_every",
        type=int,
        default=10,
        metavar="K",
        help="With --policy commit: copy the state every K steps (10: a copy costs a tenth of what it would at every "
        "step, and a loss five steps on the average).",
    )
    ours.add_argument(
        "--force-source",
        "--force_source",
        choices=[source.value for source in Source],
        default=None,
        help="Take the lost state from there, whatever it costs: for comparisons.",
    )
    ours.add_argument(
        "--replay-helpers",
        "--replay_helpers",
        default="auto",
        metavar="N",
        help="How many idle ranks help with a replay (protect(build_stage=...)); auto: as many as make it faster.",
    )
    ours.add_argument("--inject", metavar="SPEC", help="Faults to inject, for tests (becomes REGROW_FAULTS).")
    return made


def _share(text: str) -> float:
    """Read 3.5% or 0.035."""
    number = float(text.removesuffix("%"))
    return number / 100 if text.endswith("%") else number


def _duration(text: str) -> float:
    """Read 90, 90s, 30min, 4h or 2d as seconds."""
    for unit, factor in (("min", 60.0), ("h", 3600.0), ("d", 86400.0), ("s", 1.0)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    return float(text)


def _replay_helpers(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ValueError(f"--replay-helpers must be auto or a number from 0 on, got {text!r}")
    return int(text)


def parse(argv: list[str]) -> RunOptions:
    """Return the checked options; what the user got wrong ends in one sentence on stderr and exit code 2."""
    made = parser()
    args = made.parse_args(argv)
    for name, sentence in _REFUSED.items():
        if getattr(args, name) != made.get_default(name):
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
        nproc = determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--nproc-per-node: {error}") from None
    if args.standalone and several:
        raise ValueError(f"--standalone is for one node, got {'--standby' if most == 1 else f'--nnodes {args.nnodes}'}")
    try:
        conf = _parse_rendezvous_config(args.rdzv_conf)
        join_timeout_s = float(conf.pop("join_timeout", 300.0))
        node_rank = conf.pop("rank", args.node_rank)
    except ValueError as error:
        raise ValueError(f"--rdzv-conf: {error}") from None
    for flag in ("redirects", "tee"):
        try:
            Std.from_str(getattr(args, flag))
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
