"""The flags of ``regrow run``: torchrun's, some with another default, and our own."""

from __future__ import annotations

import argparse
import os

from regrow.agent import torchrun
from regrow.rules import Policy, Source

_DEFAULTS = {"max_restarts": 100, "node_rank": None, "shutdown_timeout": 5, "start_method": "forkserver"}


def parser() -> argparse.ArgumentParser:
    """Return a parser of torchrun's flags and regrow's."""
    made = argparse.ArgumentParser(
        prog="regrow run",
        usage="regrow run [options] training_script [its arguments]",
        description="Start a training script on this host; replace only the workers that die.",
        allow_abbrev=False,  # or a script's own --virtual would be refused as one of several of these
    )
    torchrun.add_flags(made.add_argument_group("torchrun").add_argument)
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
    torchrun.add_script(made)
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
