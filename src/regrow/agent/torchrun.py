"""torchrun's command line, said again: PyTorch takes seconds to import, and an agent has no other need of it.

The names, types, defaults, choices and environment variables (``PET_<NAME>``) are torchrun's, and a test compares
them with its own parser. What an agent cannot do, or does otherwise, is refused in one sentence.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntFlag
from typing import Any


def _filters(text: str) -> list[str]:
    """Split at commas; two of them are one that is meant."""
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag of torchrun. ``switch``: it takes no value. ``refused``: what to say if it is given."""

    name: str
    default: Any = None
    help: str = ""
    type: Callable[[str], Any] = str
    short: str = ""
    switch: bool = False
    choices: tuple[str, ...] | None = None
    from_env: bool = True
    refused: str = ""

    @property
    def dest(self) -> str:
        """Its name among the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def effective(self) -> Any:
        """What counts unless it is given on the command line: the environment's, if that has it."""
        given = os.environ.get(f"PET_{self.dest.upper()}") if self.from_env else None
        if given is None:
            return self.default
        return given not in ("", "0") if self.switch else given

    def add(self, add_argument: Callable[..., Any]) -> None:
        """Make it an argument of a parser; a dash may also be written as an underscore."""
        names = [name for name in (self.short, self.name) if name]
        names += [f"--{self.dest}"] if f"--{self.dest}" != self.name else []
        text = f"Not supported: {self.refused}." if self.refused else self.help
        if self.switch:
            add_argument(*names, action="store_true", default=self.effective, help=text)
        else:
            add_argument(*names, type=self.type, default=self.effective, choices=self.choices, help=text)


FLAGS = (
    Flag("--nnodes", "1:1", "How many hosts take part: N, or MIN:MAX."),
    Flag("--nproc-per-node", "1", "Workers on this host: a number, or auto, cpu, gpu, xpu."),
    Flag("--rdzv-backend", "static", "How hosts find each other: static or c10d (the same here)."),
    Flag("--rdzv-endpoint", "", "HOST:PORT at which the first agent is reached."),
    Flag("--rdzv-id", "none", "The name of the run, the same on all hosts."),
    Flag("--rdzv-conf", "", "More about meeting, as KEY=VALUE,...: join_timeout (seconds), rank."),
    Flag("--standalone", False, "One host, with a free port and a name of its own.", switch=True),
    Flag("--max-restarts", 0, "So many workers are replaced; one more loss ends the run.", type=int),
    Flag("--monitor-interval", 0.1, "Without effect: deaths are noticed at once.", type=float),
    Flag(
        "--start-method",
        "spawn",
        "forkserver: workers are forked from a process that has loaded PyTorch. spawn: each loads it.",
        choices=("spawn", "fork", "forkserver"),
    ),
    Flag("--event-log-handler", "null", refused="read events.*.jsonl in --log-dir"),
    Flag("--role", "default", "What workers are called where their output is copied to the console."),
    Flag("--module", False, "The script is a module's name, as after python -m.", short="-m", switch=True),
    Flag("--no-python", False, "The script is a program of its own, not Python's.", switch=True),
    Flag("--run-path", False, switch=True, refused="give the script itself"),
    Flag("--log-dir", None, "Where logs and events go; a new directory in the system's temporary one if not given."),
    Flag(
        "--redirects",
        "0",
        "Output that goes to files in the log directory: 0 none, 1 stdout, 2 stderr, 3 both; or for some local ranks "
        "only, like 0:1,1:3.",
        short="-r",
    ),
    Flag("--tee", "0", "Output that goes to files and to the console; written like --redirects.", short="-t"),
    Flag("--local-ranks-filter", "", "Only these local ranks' output goes to the console, like 0,1."),
    Flag("--duplicate-stdout-filters", [], type=_filters, refused="use --tee"),
    Flag("--duplicate-stderr-filters", [], type=_filters, refused="use --tee"),
    Flag("--node-rank", 0, "This host's number, if it must have a certain one.", type=int),
    Flag("--master-addr", "127.0.0.1", "The first agent's host, where --rdzv-endpoint is not given."),
    Flag("--master-port", None, "Its port (29500).", type=int),
    Flag("--local-addr", None, "This host's address; --host-addr is the same."),
    Flag("--logs-specs", None, from_env=False, refused="use --log-dir, --redirects and --tee"),
    Flag(
        "--numa-binding",
        None,
        choices=("node", "socket", "exclusive", "core-complex"),
        from_env=False,
        refused="start the workers under numactl with --no-python",
    ),
    Flag("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT", refused="SIGTERM, SIGINT and SIGHUP end the job"),
    Flag("--shutdown-timeout", None, "Seconds that workers have to end before they are killed.", type=int),
    Flag("--virtual-local-rank", False, switch=True, refused="choose the device by LOCAL_RANK"),
)


def add_flags(add_argument: Callable[..., Any]) -> None:
    """Give a parser, or a group in it, torchrun's flags."""
    for flag in FLAGS:
        flag.add(add_argument)


def add_script(parser: argparse.ArgumentParser) -> None:
    """Let the script end the options: what comes after it is its own."""
    parser.add_argument("training_script", help="The script, module or program that every worker runs.")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Its own arguments.")


def refusals(args: argparse.Namespace) -> list[str]:
    """Say what was asked for, on the command line or in the environment, and cannot be."""
    return [
        f"{flag.name} is not supported: {flag.refused}"
        for flag in FLAGS
        if flag.refused and getattr(args, flag.dest) != flag.default
    ]


def local_world_size(text: str) -> int:
    """Read ``--nproc-per-node``. Only where it names a kind of device is PyTorch asked how many there are."""
    try:
        return int(text)
    except ValueError:
        from torch.distributed.run import determine_local_world_size

        return int(determine_local_world_size(text))


def rendezvous_conf(text: str) -> dict[str, str]:
    """Read ``--rdzv-conf``."""
    pairs = [part.partition("=") for part in text.split(",") if text.strip()]
    for key, _, value in pairs:
        if not key.strip() or not value.strip():
            raise ValueError(f"must be KEY=VALUE,KEY=VALUE,..., got {text!r}")
    return {key.strip(): value.strip() for key, _, value in pairs}


class Streams(IntFlag):
    """Some of a process's two outputs."""

    NONE = 0
    OUT = 1
    ERR = 2


def streams(text: str) -> Callable[[int], Streams]:
    """Read ``--redirects`` or ``--tee``: the streams of each local rank."""
    if re.fullmatch("[0-3]", text):
        same = Streams(int(text))
        return lambda local_rank: same
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ValueError(f"must be 0, 1, 2 or 3, or like 0:1,1:3 for some local ranks, got {text!r}")
    each = {int(rank): Streams(int(what)) for rank, what in (part.split(":") for part in text.split(","))}
    return lambda local_rank: each.get(local_rank, Streams.NONE)
