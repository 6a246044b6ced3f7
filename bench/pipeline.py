"""What journaling costs a pipeline, and what a replay saves: ratios from one interleaved run.

Prints a table with the bounds that the figures should meet, and writes ``bench/out/pipeline.json``.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from data_parallel import HERE, Figure, conclude, facts, finish, say
from regrow import events

SCRIPT = HERE / "pipeline_job.py"
OUT = HERE / "out" / "pipeline.json"
STAGES, WARM_UP = 4, 6
EVERY, LOST = 20, 15
AT = EVERY + LOST


def job(home: Path, domain: str, what: str, steps: int, *flags: str, inject: str | None = None) -> list[str]:
    return [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(STAGES), "--spares", "1" if inject else "0",
        "--failure-domain", domain, "--log-dir", str(home / "logs"), *(("--inject", inject) if inject else ()),
        str(SCRIPT), what, "--out", str(home / "out"), "--steps", str(steps), *flags,
    ]  # fmt: skip


def step_ratios(pairs: int, *flags: str) -> tuple[float, float]:
    """Time of a journaled step over that of a plain one beside it, and bytes journaled over bytes that crossed."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        finish(job(home, "rank", "compare", WARM_UP + pairs, "--checkpoint-every", "1000000", *flags))
        ranks = [[fact for fact in facts(home / "out", rank) if "plain_s" in fact] for rank in range(STAGES)]
    rows = list(zip(*ranks, strict=True))[WARM_UP:]
    times = [max(fact["protected_s"] for fact in row) / max(fact["plain_s"] for fact in row) for row in rows]
    journaled = sum(fact["journaled"] for row in rows for fact in row)
    return statistics.median(times), journaled / sum(fact["crossed"] for row in rows for fact in row)


def recovery_s(domain: str, wait_s: float) -> float:
    """Seconds from the loss of a stage, 15 steps after a checkpoint, until all ranks have done the step it died in."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        inject = f"kill rank=1 step={AT} point=before_forward"
        flags = ("--checkpoint-every", str(EVERY), "--wait-s", str(wait_s))
        finish(job(home, domain, "train", AT + 3, *flags, inject=inject))
        (lost,) = [event for event in events.read(home / "logs") if event["event"] == "worker_lost"]
        done = [
            min(fact["t"] for fact in facts(home / "out", rank) if fact["step"] == AT and fact["completed"])
            for rank in range(STAGES)
        ]
    return max(done) - float(lost["t_noticed"])


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
    journaled, synchronous = [], []
    for _ in range(args.rounds):
        journaled.append(step_ratios(100))
        synchronous.append(step_ratios(30, "--synchronous"))
    add("journal_step_ratio", [time for time, _ in journaled], "at most 1.03", lambda m: m <= 1.03)
    add("sync_log_step_ratio", [time for time, _ in synchronous])
    add("journal_bytes_ratio", [size for _, size in journaled], "at most 1.01", lambda m: m <= 1.01)
    for name, wait_s in (("replay_vs_rollback", 0.0), ("replay_vs_rollback_waiting", 0.004)):
        pairs = [(recovery_s("rank", wait_s), recovery_s("host", wait_s)) for _ in range(args.rounds)]
        bound = ("at least 3", lambda m: m >= 3) if not wait_s else ("", lambda m: True)
        add(name, [everyone / alone for alone, everyone in pairs], *bound)
        add(name.replace("vs_rollback", "s"), [alone for alone, _ in pairs])
    return conclude(OUT, {figure.name: figure.to_json() for figure in figures}, figures)


if __name__ == "__main__":
    sys.exit(main())
