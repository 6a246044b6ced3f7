"""What protection costs and how fast it heals, for data parallelism: ratios from one interleaved run.

Prints a table with the bounds that the figures should meet, and writes ``bench/out/data_parallel.json``: for each
figure the median, the spread (least and greatest) and the number of measurements, by number of workers where that
matters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mlp_job import mlp
from regrow import events
from regrow.undo import Ledger

HERE = Path(__file__).parent
SCRIPT = HERE / "mlp_job.py"
OUT = HERE / "out" / "data_parallel.json"
WARM_UP = 5


@dataclass
class Figure:
    """Measurements of one thing, and the bound that it should meet."""

    name: str
    values: list[float]
    bound: str = ""
    holds: Callable[[float], bool] = lambda median: True

    def median(self) -> float:
        return statistics.median(self.values)

    def to_json(self) -> dict[str, float | int | list[float]]:
        spread = [min(self.values), max(self.values)]
        return {"median": self.median(), "spread": spread, "measurements": len(self.values)}

    def line(self) -> str:
        verdict = "" if not self.bound else f"{self.bound:>16}  {'ok' if self.holds(self.median()) else 'MISSED'}"
        spread = f"{min(self.values):9.3f} .. {max(self.values):.3f}"
        return f"{self.name:42}{self.median():9.3f}   {spread:24}{verdict}"


def say(text: str) -> None:
    print(text, flush=True)


def conclude(out: Path, result: dict[str, Any], figures: list[Figure]) -> int:
    """Write the figures down and say whether all bounds hold; return the exit code."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    missed = [figure.name for figure in figures if figure.bound and not figure.holds(figure.median())]
    verdict = f"missed: {', '.join(missed)}" if missed else "all bounds hold"
    say(f"written to {out.relative_to(HERE.parent)}; {verdict}")
    return 1 if missed else 0


# jobs ----------------------------------------------------------------------------------------------------------------


def protected(logs: Path, workers: int, spares: int, *job: str) -> list[str]:
    return [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(workers), "--spares", str(spares),
        "--log-dir", str(logs), str(SCRIPT), *job,
    ]  # fmt: skip


def plain(workers: int, *job: str) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers), "--max-restarts", "3",
        "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", str(SCRIPT), *job,
    ]  # fmt: skip


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a job, and end it with everything it started."""
    # without this switch a restart under gloo finds the old store's address and fails
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with tempfile.TemporaryFile() as noise:
        process = subprocess.Popen(command, env=environment, stdout=noise, stderr=noise, start_new_session=True)
        try:
            yield process
        except BaseException:
            noise.seek(0)
            sys.stderr.write(noise.read().decode(errors="replace")[-4000:])
            raise
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def finish(command: list[str], timeout_s: float = 300.0) -> None:
    with running(command) as process:
        code = process.wait(timeout_s)
        if code != 0:
            raise RuntimeError(f"exit code {code}: {' '.join(command)}")


def facts(out: Path, rank: int) -> list[dict]:
    path = out / f"rank{rank}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)


# failure-free --------------------------------------------------------------------------------------------------------


def step_ratios(workers: int, launches: int, pairs: int, *flags: str) -> list[float]:
    """Time of a protected step over that of the plain one beside it: a median for each launch; the slowest rank counts.

    ``pairs`` is for 2 workers, and fewer for more, whose steps take longer. Single steps vary much on a shared
    machine, so it takes many pairs to tell a hundredth; a null comparison shows how far to trust them. Which of the two
    models is built first alternates.
    """
    found = []
    for number in range(launches):
        order = ("--plain-first",) if number % 2 else ()
        steps = str(WARM_UP + 2 * pairs // workers)
        with tempfile.TemporaryDirectory() as name:
            finish(
                protected(
                    Path(name) / "logs", workers, 0, "compare", "--out", f"{name}/out", "--steps", steps, *order, *flags
                )
            )
            rows = list(zip(*(facts(Path(name) / "out", rank) for rank in range(workers)), strict=True))[WARM_UP:]
        ratios = [max(fact["protected_s"] for fact in row) / max(fact["plain_s"] for fact in row) for row in rows]
        found.append(statistics.median(ratios))
    return found


def peak_mb(command: Callable[[Path], list[str]], workers: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        finish(command(Path(name)))
        return max(facts(Path(name) / "out", rank)[-1]["peak_mb"] for rank in range(workers))


def memory(workers: int, rounds: int, *flags: str) -> tuple[list[float], list[float]]:
    """Peak resident memory of a worker, protected and plain, in turn."""

    def job(home: Path) -> tuple[str, ...]:
        return ("train", "--steps", "12", "--out", str(home / "out"))

    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(peak_mb(lambda home: protected(home / "logs", workers, 0, *job(home), *flags), workers))
        theirs.append(peak_mb(lambda home: plain(workers, *job(home)), workers))
    return ours, theirs


# recovery ------------------------------------------------------------------------------------------------------------


@dataclass
class Recovery:
    """One kill: seconds until every rank has done a step again, one step's time, and what was moved how fast."""

    total_s: float
    step_s: float
    gb_s: float | None


def back_at(out: Path, workers: int, killed_at: float, old: set[int]) -> float | None:
    """When the last rank had done its first step at full strength after the kill."""
    times = []
    for rank in range(workers):
        after = [fact for fact in facts(out, rank) if "step" in fact and fact["t"] > killed_at]
        times.append({fact["step"]: fact["t"] for fact in after if fact["pid"] not in old})
    common = set.intersection(*(set(by_step) for by_step in times))
    return max(by_step[min(common)] for by_step in times) if common else None


def kill_one(out: Path, logs: Path, workers: int, dice: random.Random) -> Recovery:
    victim = facts(out, dice.randrange(workers))[-1]["pid"]
    steps = [fact["step_s"] for fact in facts(out, 0)[-8:]]
    killed_at = time.time()
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: back_at(out, workers, killed_at, {victim}) is not None, "a step at full strength")
    time.sleep(0.5)
    back = back_at(out, workers, killed_at, {victim})
    assert back is not None
    speeds = [
        event["bytes_in"] / event["receiving_s"] / 1e9
        for event in events.read(logs)
        if event["event"] == "transferred" and event["bytes_in"] > 1e6 and event["t"] > killed_at
    ]
    return Recovery(back - killed_at, statistics.median(steps), speeds[0] if speeds else None)


def recoveries(workers: int, spares: int, kills: int, dice: random.Random) -> list[Recovery]:
    """Kill random ranks of one job, one after the other, each time after everything is at rest again."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        out, logs = Path(name) / "out", Path(name) / "logs"
        command = protected(logs, workers, spares, "train", "--out", str(out), "--steps", "100000")
        with running(command) as process:
            for number in range(kills):

                def ready(number: int = number) -> bool:
                    steps = [sum("step" in fact for fact in facts(out, rank)) for rank in range(workers)]
                    seen = [event["event"] for event in (events.read(logs) if logs.is_dir() else [])]
                    return min(steps) >= WARM_UP and (spares == 0 or seen.count("spare_ready") > number)

                wait_until(ready, f"the job to be ready for kill {number}")
                time.sleep(dice.uniform(1.0, 1.5))
                found.append(kill_one(out, logs, workers, dice))
                assert process.poll() is None
    return found


def torchrun_restart(workers: int, dice: random.Random) -> float:
    """The same kill under torchrun, whose workers all start again from a checkpoint of the previous step."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        with running(plain(workers, "train", "--out", str(out), "--steps", "100000", "--checkpoint-at", "8")):
            wait_until(lambda: (out / "checkpoint.pt").exists(), "the checkpoint")
            wait_until(lambda: min(len(facts(out, rank)) for rank in range(workers)) >= 9, "the step after it")
            pids = [facts(out, rank)[-1]["pid"] for rank in range(workers)]
            killed_at = time.time()
            os.kill(pids[dice.randrange(workers)], signal.SIGKILL)
            wait_until(lambda: back_at(out, workers, killed_at, set(pids)) is not None, "torchrun's restart")
            total = back_at(out, workers, killed_at, set(pids))
            assert total is not None
            return total - killed_at


def start_seconds() -> float:
    """Seconds to start Python and import torch and the script: what any new process must do. Its end is not counted."""
    code = f"import os, sys; sys.path.insert(0, {str(HERE)!r}); import torch, {SCRIPT.stem}; os._exit(0)"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.monotonic() - began


def gloo_gb_s(rounds: int) -> list[float]:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        finish(plain(2, "bandwidth", "--out", str(out), "--steps", str(rounds)))
        return [fact["gloo_gb_s"] for fact in facts(out, 1)][1:]


# undo ----------------------------------------------------------------------------------------------------------------


def undo_ratios(rounds: int, *, exact: bool) -> tuple[list[float], list[float], float]:
    """Time of taking a step back over that of the step, the step with its records over the bare one, bytes kept."""
    torch.set_num_threads(1)
    model = mlp()
    params = list(model.parameters())
    optimizer = torch.optim.Adam(params, lr=1e-4)
    ledger = Ledger(optimizer, exact=exact)
    undos, records, kept = [], [], 0.0
    for number in range(rounds + WARM_UP):
        for param in params:
            param.grad = torch.randn_like(param) * 1e-3
        began = time.perf_counter()
        ledger.before()
        noted = time.perf_counter()
        optimizer.step()
        stepped = time.perf_counter()
        ledger.after()
        recorded = time.perf_counter()
        if number >= WARM_UP:
            kept = ledger.nbytes() / sum(param.numel() for param in params)
            ledger.undo(params)
            undone = time.perf_counter()
            undos.append((undone - recorded) / (stepped - noted))
            records.append((recorded - began) / (stepped - noted))
            optimizer.step()
        ledger.clear()
    return undos, records, kept


# all of it -----------------------------------------------------------------------------------------------------------


def measure(workers: int, dice: random.Random, rounds: int) -> dict[str, Figure]:
    """All figures that depend on the number of workers."""
    found: dict[str, Figure] = {}

    def add(name: str, values: list[float], bound: str = "", holds: Callable[[float], bool] = lambda m: True) -> None:
        found[name] = Figure(name, values, bound, holds)
        say(f"  {workers} workers  {found[name].line()}")

    add("null_ratio", step_ratios(workers, rounds, 60, "--null"))
    add("step_time_ratio", step_ratios(workers, rounds, 250), "at most 1.02", lambda m: m <= 1.02)
    fast = step_ratios(workers, rounds, 60, "--wait-free", "--inexact")
    add("wait_free_ratio", fast, "below 1", lambda m: m < 1)
    add("wait_free_exact_ratio", step_ratios(workers, max(2, rounds // 2), 20, "--wait-free"))
    peaks, theirs = memory(workers, max(2, rounds // 2))
    base = statistics.median(theirs)
    add(
        "peak_memory_ratio",
        [value / base for value in peaks],
        "1.02 + 30 MB",
        lambda m: m * base <= 1.02 * base + 30,
    )
    for name, flags in (("wait_free_memory_ratio", ("--inexact",)), ("wait_free_exact_memory_ratio", ())):
        add(name, [value / base for value in memory(workers, 1, "--wait-free", *flags)[0]])
    bandwidth = gloo_gb_s(6)
    warm: list[Recovery] = []
    restarts, quotients = [], []
    for _ in range(rounds):  # in turn, since the machine is faster at one time than at another
        ours = recoveries(workers, 1, 3, dice)
        restarts.append(torchrun_restart(workers, dice))
        quotients.append(restarts[-1] / statistics.median(item.total_s for item in ours))
        warm += ours
    bandwidth += gloo_gb_s(6)
    add("recovery_s", [item.total_s - item.step_s for item in warm], "at most 0.3", lambda m: m <= 0.3)
    raw = statistics.median(bandwidth)
    add(
        "transfer_vs_gloo",
        [item.gb_s / raw for item in warm if item.gb_s is not None],
        "at least 0.7",
        lambda m: m >= 0.7,
    )
    starts, cold = [], []
    for _ in range(max(2, rounds // 2)):
        starts.append(start_seconds())
        cold += recoveries(workers, 0, 1, dice)
    add("start_s", starts)
    limit = 1.3 * statistics.median(starts)
    add(
        "recovery_s_no_spare",
        [item.total_s - item.step_s for item in cold],
        f"at most {limit:.2f}",
        lambda m: m <= limit,
    )
    add("torchrun_restart_s", restarts)
    add("recovery_vs_torchrun", quotients, "at least 10", lambda m: m >= 10)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4, help="how much to measure; 2 for a quick look")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the jobs are ended, too
    dice = random.Random(0)
    result: dict[str, dict] = {}
    say(f"{'figure':55}{'median':>9}   {'spread':24}{'bound':>16}")
    undos, records, kept = undo_ratios(4 * args.rounds, exact=False)
    exact_undos, exact_records, exact_kept = undo_ratios(4 * args.rounds, exact=True)
    single = [
        Figure("undo_vs_step", undos, "at most 1.5", lambda m: m <= 1.5),
        Figure("undo_exact_vs_step", exact_undos),
        Figure("records_vs_step", records),
        Figure("records_exact_vs_step", exact_records),
        Figure("records_bytes_per_parameter", [kept]),
        Figure("records_exact_bytes_per_parameter", [exact_kept]),
    ]
    figures = list(single)
    for figure in single:
        say(f"  1 process  {figure.line()}")
        result[figure.name] = figure.to_json()
    for workers in args.workers:
        for name, figure in measure(workers, dice, args.rounds).items():
            result.setdefault(name, {})[str(workers)] = figure.to_json()
            figures.append(figure)
    return conclude(OUT, result, figures)


if __name__ == "__main__":
    sys.exit(main())
