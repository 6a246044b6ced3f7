"""What journaling costs a pipeline, and what a replay saves: ratios from one interleaved run.

Four stages share two cores here. So that these do not decide, recoveries are compared with a micro-batch's
computing emulated by a wait; the same with real computing is printed beside it.

Prints a table with the bounds that the figures should meet, and writes ``bench/out/pipeline.json``.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from data_parallel import HERE, Figure, conclude, facts, finish, say
from regrow import events
from regrow.plan.grouping import Chain, best

SCRIPT = HERE / "pipeline_job.py"
OUT = HERE / "out" / "pipeline.json"
STAGES, WARM_UP = 4, 6
EVERY, LOST = 20, 15
AT = EVERY + LOST
BY_RANK, BY_HOST = ("--failure-domain", "rank"), ("--failure-domain", "host")
ALONE = ("--replay-helpers", "0")
COMPUTING = ("--rows", "128")
"""Enough rows in a micro-batch for its computing to outweigh the parameters' way to the helpers, as in practice."""
WAITING = ("--width", "64", "--wait-s", "0.01")
"""Each micro-batch takes 10 ms forward and 20 ms backward, and hardly any of the two cores."""
SMALL_MB, LARGE_MB, SLACK_MB = 8, 64, 16


def job(home: Path, what: str, steps: int, *script: str, flags: Sequence[str] = (), kill: bool = False) -> list[str]:
    inject = ("--inject", f"kill rank=1 step={AT} point=before_forward") if kill else ()
    return [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(STAGES), "--spares", "1" if kill else "0",
        "--log-dir", str(home / "logs"), *flags, *inject,
        str(SCRIPT), what, "--out", str(home / "out"), "--steps", str(steps), *script,
    ]  # fmt: skip


class Ratios(NamedTuple):
    """What journaling costs."""

    median: float
    total: float
    journaled: float


def step_ratios(pairs: int, *script: str) -> Ratios:
    """Time of a journaled step over that of a plain one beside it, and bytes journaled over bytes that crossed."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        finish(job(home, "compare", WARM_UP + pairs, "--checkpoint-every", str(EVERY), *script, flags=BY_RANK))
        ranks = [[fact for fact in facts(home / "out", rank) if "plain_s" in fact] for rank in range(STAGES)]
    rows = list(zip(*ranks, strict=True))[WARM_UP:]
    ours = [max(fact["protected_s"] for fact in row) for row in rows]
    plain = [max(fact["plain_s"] for fact in row) for row in rows]
    journaled = sum(fact["journaled"] for row in rows for fact in row)
    return Ratios(
        statistics.median(a / b for a, b in zip(ours, plain, strict=True)),
        sum(ours) / sum(plain),
        journaled / sum(fact["crossed"] for row in rows for fact in row),
    )


class Recovery(NamedTuple):
    """How long it took to be where the loss was."""

    whole_s: float
    """From the loss of a stage, 15 steps after a checkpoint, until all have done the step it died in, less one step."""
    replay_s: float
    """The lost steps alone."""


def recovery(flags: Sequence[str], *script: str) -> Recovery:
    """Kill a stage, and see how long it takes."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        finish(job(home, "train", AT + 3, "--checkpoint-every", str(EVERY), *script, flags=flags, kill=True))
        seen = events.read(home / "logs")
        (lost,) = [event for event in seen if event["event"] == "worker_lost"]
        replayed = [event["seconds"] for event in seen if event["event"] == "replayed" and event["rank"] == 1]
        done: dict[int, float] = {}
        for rank in range(STAGES):
            for fact in facts(home / "out", rank):
                if fact["completed"] and (fact["step"] == AT or fact["t"] < float(lost["t_noticed"])):
                    done[fact["step"]] = max(done.get(fact["step"], 0.0), fact["t"])
    one_step_s = statistics.median(done[step] - done[step - 1] for step in range(WARM_UP, AT))
    whole_s = done[AT] - float(lost["t_noticed"]) - one_step_s
    return Recovery(whole_s, replayed[0] if replayed else float("nan"))


def peak_rss_mb(journal_mb: int) -> float:
    """Most memory that a rank held, with a journal of this size whose disk takes 10 MB a second."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        flags = (*BY_RANK, "--journal-memory", str(journal_mb))
        finish(job(home, "train", 60, "--checkpoint-every", "1000", "--disk-mb-s", "10", flags=flags))
        return max(fact["rss_mb"] for rank in range(STAGES) for fact in facts(home / "out", rank))


def grouping_s(seed: int) -> float:
    """Seconds to find the best groups of 1,000 machines under a cap."""
    rng = random.Random(seed)
    chain = Chain(
        replay_s=tuple(rng.uniform(0.5, 2.0) for _ in range(1000)),
        boundary_bytes=tuple(rng.uniform(1e6, 1e9) for _ in range(999)),
        bandwidth=1e9,
        interval=100,
    )
    cap = sum(chain.cut_bytes) * rng.choice((0.05, 0.2, 0.5, 0.9))
    began = time.monotonic()
    best(chain, cap)
    return time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how much to measure; 1 for a quick look")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: list[Figure] = []

    def add(name: str, values: list[float], bound: str = "", holds: Callable[[float], bool] = lambda m: True) -> None:
        figures.append(Figure(name, values, bound, holds))
        say(f"  {STAGES} stages  {figures[-1].line()}")

    say(f"{'figure':54}{'median':>9}   {'spread':24}{'bound':>16}")
    add("grouping_1000_machines_s", [grouping_s(seed) for seed in range(8)], "below 1", lambda m: m < 1)

    journaled, synchronous = [], []
    for _ in range(args.rounds):
        journaled.append(step_ratios(100))
        synchronous.append(step_ratios(30, "--synchronous"))
    add("journal_step_ratio", [ratios.median for ratios in journaled], "at most 1.03", lambda m: m <= 1.03)
    add("journal_and_checkpoints_ratio", [ratios.total for ratios in journaled])
    add("sync_log_step_ratio", [ratios.median for ratios in synchronous])
    add("journal_bytes_ratio", [ratios.journaled for ratios in journaled], "at most 1.01", lambda m: m <= 1.01)

    for name, script, bound in (("", WAITING, "at least 3"), ("_computing", COMPUTING, "")):
        shared, everyone, alone = [], [], []
        for _ in range(args.rounds):
            shared.append(recovery(BY_RANK, *script))
            everyone.append(recovery(BY_HOST, *script))
            alone.append(recovery((*BY_RANK, *ALONE), *script))
        helped = [b.whole_s / a.whole_s for a, b in zip(shared, everyone, strict=True)]
        add(f"replay_vs_rollback{name}", helped, bound, lambda m: m >= 3)
        add(f"replay_alone_vs_rollback{name}", [b.whole_s / a.whole_s for a, b in zip(alone, everyone, strict=True)])
        for what, found in (("replay", shared), ("replay_alone", alone), ("rollback", everyone)):
            add(f"{what}_s{name}", [each.whole_s for each in found])
        if name:
            add(f"parallel_vs_serial{name}", [b.replay_s / a.replay_s for a, b in zip(shared, alone, strict=True)])
    three, one = [], []
    for _ in range(args.rounds):
        three.append(recovery((*BY_RANK, "--replay-helpers", "3"), *WAITING))
        one.append(recovery((*BY_RANK, *ALONE), *WAITING))
    ratios = [b.replay_s / a.replay_s for a, b in zip(three, one, strict=True)]
    add("parallel_vs_serial", ratios, "at least 2", lambda m: m >= 2)

    small, large = [], []
    for _ in range(min(2, args.rounds)):
        small.append(peak_rss_mb(SMALL_MB))
        large.append(peak_rss_mb(LARGE_MB))
    more = [SMALL_MB + b - a for a, b in zip(small, large, strict=True)]
    add("journal_rss_mb", more, f"at most {LARGE_MB + SLACK_MB}", lambda m: m <= LARGE_MB + SLACK_MB)
    return conclude(OUT, {figure.name: figure.to_json() for figure in figures}, figures)


if __name__ == "__main__":
    sys.exit(main())
