"""What snapshots in the memory of hosts cost a sharded job, and how fast they come back: ratios from interleaved runs.

Two hosts as network namespaces whose link is slow, so that a snapshot that is sent without care costs much. Needs root
and iproute2. Prints a table with the bounds that the figures should meet, and writes ``bench/out/peer.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from data_parallel import HERE, Figure, conclude, facts, say
from lab import Lab, why_not
from peer_job import BLOCK, MODES, WARM_UP, mode_of
from regrow import events

SCRIPT = HERE / "peer_job.py"
OUT = HERE / "out" / "peer.json"
HOSTS = 2
SLOW_MBIT_S, FAST_MBIT_S = 400, 2000
STATE_GB = 1.0
DISK_EVERY_S = 600.0
"""What is compared with: a checkpoint on disk every ten minutes, of which half is lost on the average."""
WAITING = ("--wait-s", "0.15")
"""Each block takes 0.15 s forward and 0.3 s backward, and hardly any of the two cores: as on a device of its own."""
COMPUTING = ("--rows", "12288")
"""About as long, on the same two cores that also move the snapshots."""


@contextmanager
def job(
    lab: Lab, home: Path, steps: int, *script: str, spares: int = 0, flags: Sequence[str] = ()
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run one worker on each host, and end them with everything they started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REGROW_TOKEN": secrets.token_hex(16)}
    agents = []
    with (home / "noise").open("wb+") as noise:
        try:
            for host in range(HOSTS):
                command = [
                    sys.executable, "-m", "regrow", "run", "--nnodes", str(HOSTS), "--node-rank", str(host),
                    "--rdzv-endpoint", f"{lab.address(0)}:29400", "--host-addr", lab.address(host),
                    "--nproc-per-node", "1", "--spares", str(spares), "--snapshot-every", "1", *flags,
                    "--log-dir", str(home / "logs"), str(SCRIPT), "--out", str(home / "out"), "--steps", str(steps),
                    *script,
                ]  # fmt: skip
                agents.append(
                    subprocess.Popen(
                        lab.on(host, command), env=environment, stdout=noise, stderr=noise, start_new_session=True
                    )
                )
            yield agents
        except BaseException:
            noise.seek(0)
            sys.stderr.write(noise.read().decode(errors="replace")[-4000:])
            raise
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()


def finish(agents: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for agent in agents:
        code = agent.wait(max(deadline - time.monotonic(), 1.0))
        if code != 0:
            raise RuntimeError(f"an agent ended with exit code {code}")


def ends(home: Path) -> dict[int, float]:
    """Return when each step was complete on all ranks."""
    found: dict[int, float] = {}
    for rank in range(HOSTS):
        for fact in facts(home / "out", rank):
            if fact["completed"]:
                found[fact["step"]] = max(found.get(fact["step"], 0.0), fact["t"])
    return found


def step_ratios(lab: Lab, cycles: int, *script: str) -> dict[str, list[float]]:
    """Return, for each way of taking snapshots, the time of a step over one without; a value for each cycle."""
    steps = WARM_UP + cycles * BLOCK * len(MODES)
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        with job(lab, home, steps, "--modes", *script) as agents:
            finish(agents, 60 + 6.0 * steps)
        done = ends(home)
    found: dict[str, list[float]] = {mode: [] for mode in (*MODES, "step_s")}
    for cycle in range(cycles):
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        first = WARM_UP + cycle * BLOCK * len(MODES)
        for step in range(first, first + BLOCK * len(MODES)):
            if (step - WARM_UP) % BLOCK:  # the first of a block waits for what the one before it has left
                times[mode_of(step)].append(done[step] - done[step - 1])
        none = statistics.mean(times["none"])
        for mode in times:
            found[mode].append(statistics.mean(times[mode]) / none)
        found["step_s"].append(none)
    return found


def retrieval(lab: Lab, rounds: int) -> list[dict[str, float]]:
    """Return how long it takes to get 1 GB of state from here and there; a row for each round."""
    script = str(HERE / "peer_state.py")
    keep = [sys.executable, script, "keep", "--address", lab.address(1)]
    keeping = subprocess.Popen(lab.on(1, keep), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert keeping.stdout is not None
        told = keeping.stdout.readline().decode().strip()
        if not told:
            raise RuntimeError("the other host's keeper did not start")
        words = [sys.executable, script, "measure", "--keeper", told, "--rounds", str(rounds)]
        answer = subprocess.run(lab.on(0, words), stdout=subprocess.PIPE, timeout=600, check=True)
    finally:
        if keeping.stdin is not None:
            keeping.stdin.close()  # it removes what it has
        try:
            keeping.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(keeping.pid, signal.SIGKILL)
            keeping.wait()
    return [json.loads(line) for line in answer.stdout.splitlines()]


def wasted_s(lab: Lab) -> float:
    """Return how much time a lost worker costs the job: detection, replacement, retrieval, steps done again."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        kills = ((1, 8, "in_backward"), (0, 14, "before_forward"), (1, 20, "after_update"))
        faults = "; ".join(f"kill rank={rank} step={step} point={point}" for rank, step, point in kills)
        with job(lab, home, 26, *WAITING, spares=1, flags=("--inject", faults)) as agents:
            finish(agents, 300)
        done = ends(home)
        lost = [event for event in events.read(home / "logs") if event["event"] == "worker_lost"]
    if len(lost) != len(kills):
        raise RuntimeError(f"{len(lost)} of {len(kills)} workers were lost")
    first, last = 4, max(done)
    typical_s = statistics.median(done[step] - done[step - 1] for step in range(first, last + 1))
    return (done[last] - done[first] - (last - first) * typical_s) / len(kills)


Add = Callable[..., None]


def add_steps(lab: Lab, cycles: int, add: Add) -> tuple[float, float]:
    """Measure steps; return how long one is, and what a snapshot adds to it, in seconds."""
    ratios = step_ratios(lab, cycles, *WAITING)
    add("step_s", ratios["step_s"])
    add("snapshot_step_ratio", ratios["scheduled"], "at most 1.03", lambda m: m <= 1.03)
    add("unscheduled_step_ratio", ratios["unscheduled"])
    add("blocking_step_ratio", ratios["blocking"], "at least 1.10", lambda m: m >= 1.10)
    computing = step_ratios(lab, min(cycles, 2), *COMPUTING)
    add("step_s_computing", computing["step_s"])
    for name, mode in (("snapshot", "scheduled"), ("unscheduled", "unscheduled"), ("blocking", "blocking")):
        add(f"{name}_step_ratio_computing", computing[mode])
    step_s = statistics.median(ratios["step_s"])
    return step_s, max(statistics.median(ratios["scheduled"]) - 1, 0.0) * step_s


def add_retrieval(lab: Lab, rounds: int, add: Add) -> list[dict[str, float]]:
    """Measure how fast state comes back."""
    rows = retrieval(lab, 1 + rounds)[1:]  # the first touches everything for the first time
    add("memcpy_gb_s", [STATE_GB / row["memcpy_s"] for row in rows])
    add("link_gb_s", [STATE_GB / row["link_s"] for row in rows])
    own = [row["memcpy_s"] / row["own_s"] for row in rows]
    add("own_memory_vs_memcpy", own, "at least 0.7", lambda m: m >= 0.7)
    add("peer_vs_link", [row["link_s"] / row["peer_s"] for row in rows], "at least 0.7", lambda m: m >= 0.7)
    add("disk_vs_memory", [row["load_s"] / row["own_s"] for row in rows])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=4, help="how much to measure; 1 for a quick look")
    args = parser.parse_args()
    missing = why_not()
    if missing:
        say(f"skipped: {missing}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: list[Figure] = []

    def add(
        name: str, values: list[float], bound: str = "", holds: Callable[[float], bool] = lambda median: True
    ) -> None:
        figures.append(Figure(name, values, bound, holds))
        say(f"  {figures[-1].line()}")

    say(f"{'figure':44}{'median':>9}   {'spread':24}{'bound':>16}")
    lab = Lab(HOSTS)
    try:
        for host in range(HOSTS):
            lab.limit(host, SLOW_MBIT_S)
        step_s, checkpoint_s = add_steps(lab, args.cycles, add)
        failure_s = wasted_s(lab)
        add("wasted_s", [failure_s])
        for host in range(HOSTS):
            lab.limit(host, FAST_MBIT_S)
        rows = add_retrieval(lab, args.cycles, add)
    finally:
        lab.close()
    disk = [row["save_s"] + DISK_EVERY_S / 2 + row["load_s"] for row in rows]
    model = [checkpoint_s + step_s / 2 + row["own_s"] for row in rows]
    measured = [checkpoint_s + failure_s + row["own_s"] for row in rows]
    add("wasted_model_ratio", [a / b for a, b in zip(disk, model, strict=True)])
    add("wasted_measured_ratio", [a / b for a, b in zip(disk, measured, strict=True)])
    return conclude(OUT, {figure.name: figure.to_json() for figure in figures}, figures)


if __name__ == "__main__":
    sys.exit(main())
