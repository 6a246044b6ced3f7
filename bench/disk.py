"""What checkpoints on storage cost at the frequency that a run finds by itself: one interleaved run.

Two workers train and write checkpoints to a directory beside this file's output, as often as the budget allows. Then
blocks of steps with and without them are compared, with synchronous saving (``torch.distributed.checkpoint.save``) at
the same frequency, and with other frequencies. Prints a table and writes ``bench/out/disk.json``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from data_parallel import HERE, Figure, conclude, facts, finish, say
from disk_job import blocks

SCRIPT = HERE / "disk_job.py"
OUT = HERE / "out" / "disk.json"
WORKERS = 2
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Gradients keep their memory from step to step: else page faults make steps vary twice as much, with and without
checkpoints."""
BUDGET = 0.035


def run_job(home: Path, ckpt: Path, *words: str) -> list[dict]:
    """Run the job to its end; return what its ranks have written."""
    command = [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(WORKERS), "--log-dir", str(home / "logs"),
        "--ckpt-dir", str(ckpt), "--ckpt-overhead", f"{BUDGET:.1%}", str(SCRIPT), "--out", str(home / "out"), *words,
    ]  # fmt: skip
    os.environ |= MALLOC
    finish(command, 3000.0)
    return [fact for rank in range(WORKERS) for fact in facts(home / "out", rank)]


def measure(home: Path, ckpt: Path, chosen: int, cycles: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the overhead of each mode in each cycle, relative to the blocks beside it; and times of steps in those."""
    ends: dict[int, float] = {}
    for fact in run_job(home, ckpt, "--found", str(chosen), "--cycles", str(cycles)):
        ends[fact["step"]] = max(ends.get(fact["step"], 0.0), fact["t"])
    order = blocks(chosen, cycles)
    # a block's first step counts as the change's: what was under way is waited for in it
    times = [(ends[b.first + b.steps - 1] - ends[b.first]) / (b.steps - 1) for b in order]
    overheads: dict[str, list[float]] = {}
    for at in range(1, len(order), 2):
        beside_s = (times[at - 1] + times[at + 1]) / 2
        overheads.setdefault(order[at].name, []).append(times[at] / beside_s - 1)
    return overheads, times[::2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=10, help="how much to measure; 1 for a quick look")
    parser.add_argument("--find", type=int, default=400, help="steps in which the run finds how often")
    args = parser.parse_args()
    OUT.parent.mkdir(parents=True, exist_ok=True)
    ckpt = Path(tempfile.mkdtemp(prefix="ckpt-", dir=OUT.parent))
    try:
        with tempfile.TemporaryDirectory(prefix="disk-", dir=OUT.parent) as home:
            told = run_job(Path(home) / "find", ckpt / "find", "--steps", str(args.find))
            chosen = told[0]["found"]
            say(f"found in {args.find} steps: {told[0]['why']}")
            overheads, plain_s = measure(Path(home) / "measure", ckpt / "measure", chosen, args.cycles)
    finally:
        shutil.rmtree(ckpt, ignore_errors=True)
    figures = [
        Figure("step_s", plain_s),
        Figure("overhead", overheads.pop("chosen"), "at most 0.035", lambda m: m <= BUDGET),
        Figure("sync_overhead", overheads.pop("sync")),
    ]
    sweep = {int(name.removeprefix("every ")): Figure(f"overhead, {name} steps", overheads[name]) for name in overheads}
    sweep[chosen] = Figure(f"overhead, every {chosen} steps (chosen)", figures[1].values)
    figures += [sweep[every] for every in sorted(sweep)]
    within = [every for every in sorted(sweep) if sweep[every].median() <= BUDGET]
    best = within[0] if within else max(sweep)
    say(f"{'figure':44}{'median':>9}   {'spread':24}{'bound':>16}")
    for figure in figures:
        say(f"  {figure.line()}")
    say(f"  chosen_k {chosen}; best_k_of_sweep {best}: the least of the sweep that keeps to the budget")
    result = {
        **{figure.name: figure.to_json() for figure in figures[:3]},
        "chosen_k": chosen,
        "best_k_of_sweep": best,
        "sweep": {str(every): sweep[every].to_json() for every in sorted(sweep)},
    }
    return conclude(OUT, result, figures)


if __name__ == "__main__":
    sys.exit(main())
