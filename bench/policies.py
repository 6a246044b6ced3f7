"""One training, one kill, four policies: what each costs while nothing fails, and how long a loss costs it.

The same job (``mlp_job.py``) is started in turn without protection and under each policy, round after round. Steady
cost: the mean time of a step over that of the unprotected run of the same round. Recovery: from the kill until every
rank has completed the step that was in progress, the furthest before the kill; that counts detection, reconnecting,
loading, and all steps that are done again. Prints a table and writes ``bench/out/policies.json``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from data_parallel import HERE, SCRIPT, Figure, conclude, facts, plain, running, say, wait_until
from regrow import events

OUT = HERE / "out" / "policies.json"
WORKERS = 2
WARM_UP = 20
"""Steps that do not count: the first checkpoint, after which it is known what one costs, is among them."""
COMMIT_EVERY = 10
POLICIES = {
    "ladder": (),
    "checkfreq": ("--policy", "checkfreq"),
    "commit": ("--policy", "commit", "--commit-every", str(COMMIT_EVERY)),
    "restart": ("--policy", "restart"),
}
STORED = ("checkfreq", "restart")


def command(policy: str, home: Path) -> list[str]:
    """Return how the job is started under a policy, with one spare, or without protection."""
    job = ("train", "--out", str(home / "out"), "--steps", "1000000")
    if policy == "unprotected":
        return plain(WORKERS, *job)
    stored = ("--ckpt-dir", str(home / "ckpt")) if policy in STORED else ()
    return [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(WORKERS), "--spares", "1",
        "--log-dir", str(home / "logs"), *POLICIES[policy], *stored, str(SCRIPT), *job,
    ]  # fmt: skip


def done(out: Path, rank: int, since: float = 0.0) -> dict[int, float]:
    """Return when a rank completed each step for the last time, as far as that was after ``since``."""
    return {fact["step"]: fact["t"] for fact in facts(out, rank) if fact.get("completed") and fact["t"] > since}


def last_step(out: Path) -> int:
    """Return the last step that all ranks have completed."""
    return min(max(done(out, rank), default=-1) for rank in range(WORKERS))


def steady_s(out: Path, steps: int) -> float:
    """Return the mean time of the steps after the warm-up, on the rank that was slowest."""
    wait_until(lambda: last_step(out) >= WARM_UP + steps, f"step {WARM_UP + steps}", 120.0)
    ends = [done(out, rank) for rank in range(WORKERS)]
    return max((end[WARM_UP + steps] - end[WARM_UP]) / steps for end in ends)


def recovery(home: Path, policy: str, dice: random.Random) -> tuple[float, int]:
    """Kill a rank; return how long it took until all had completed the step in progress, and how many were redone."""
    out, logs = home / "out", home / "logs"

    def ready() -> bool:
        seen = events.read(logs)
        saved = policy not in STORED or any(event["event"] == "disk_committed" for event in seen)
        return saved and any(event["event"] == "spare_ready" for event in seen)

    wait_until(ready, "a spare and a checkpoint")
    begun = last_step(out)
    wait_until(lambda: last_step(out) >= begun + dice.randrange(1, COMMIT_EVERY + 1), "some steps more")
    victim = facts(out, dice.randrange(WORKERS))[-1]["pid"]
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.05)  # what was completed by then is written down
    reached = max(step for rank in range(WORKERS) for step, t in done(out, rank).items() if t <= killed_at) + 1

    def back() -> list[float | None]:
        return [done(out, rank, killed_at).get(reached) for rank in range(WORKERS)]

    wait_until(lambda: None not in back(), f"step {reached} after the kill", 120.0)
    first = min(min(done(out, rank, killed_at)) for rank in range(WORKERS))
    return max(t for t in back() if t is not None) - killed_at, max(reached - first, 0)


def main() -> int:
    """Measure, print, write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40, help="how many make a mean")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    dice = random.Random(args.seed)
    names = ["unprotected", *POLICIES]
    steps: dict[str, list[float]] = {name: [] for name in names}
    recoveries: dict[str, list[float]] = {name: [] for name in POLICIES}
    redone: dict[str, list[float]] = {name: [] for name in POLICIES}
    for number in range(args.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory() as place:
                home = Path(place)
                with running(command(name, home)):
                    steps[name].append(steady_s(home / "out", args.steps))
                    if name in POLICIES:
                        took_s, again = recovery(home, name, dice)
                        recoveries[name].append(took_s)
                        redone[name].append(again)
                        say(f"  round {number + 1}: {name:12} back after {took_s:7.3f} s, {again} steps done again")
    say(f"\n{'policy':12}{'step / unprotected':>20}{'back after':>14}{'of ladder':>12}{'steps done again':>18}")
    figures = [Figure("unprotected_step_s", steps["unprotected"])]
    ladder_s = statistics.median(recoveries["ladder"])
    for name in POLICIES:
        ratios = [mine / bare for mine, bare in zip(steps[name], steps["unprotected"], strict=True)]
        figures.append(Figure(f"{name}_step_ratio", ratios))
        figures.append(Figure(f"{name}_recovery_s", recoveries[name]))
        ratios = [took_s / ladder_s for took_s in recoveries[name]]
        bound = "" if name == "ladder" else "at least 1.0"
        figures.append(Figure(f"{name}_recovery_ratio", ratios, bound, lambda median: median >= 1.0))
        figures.append(Figure(f"{name}_steps_again", redone[name]))
        ratio, took_s, of_ladder, again = (figure.median() for figure in figures[-4:])
        say(f"{name:12}{ratio:>20.3f}{took_s:>12.3f} s{of_ladder:>12.1f}{again:>18.0f}")
    say(f"\n{'figure':44}{'median':>9}   spread")
    for figure in figures:
        say(f"  {figure.line()}")
    return conclude(OUT, {figure.name: figure.to_json() for figure in figures}, figures)


if __name__ == "__main__":
    sys.exit(main())
