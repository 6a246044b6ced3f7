"""What snapshots in the memory of hosts cost a sharded job, and how fast they come back: ratios from interleaved runs.

Two hosts as network namespaces whose link is slow, so that a snapshot that is sent without care costs much. Needs root
and iproute2. Prints a table with the bounds that the figures should meet, and writes ``bench/out/peer.json``.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from data_parallel import HERE, Figure, conclude, facts, say
from lab import Lab, why_not
from peer_job import BLOCK, MODES, WARM_UP, mode_of

SCRIPT = HERE / "peer_job.py"
OUT = HERE / "out" / "peer.json"
HOSTS = 2
SLOW_MBIT_S = 400
WAITING = ("--wait-s", "0.15")
"""Each block takes 0.15 s forward and 0.3 s backward, and hardly any of the two cores: as on a device of its own."""
COMPUTING = ("--rows", "12288")
"""About as long, on the same two cores that also move the snapshots."""


@contextmanager
def job(lab: Lab, home: Path, steps: int, *script: str, spares: int = 0) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run one worker on each host, and end them with everything they started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "REGROW_TOKEN": secrets.token_hex(16)}
    agents = []
    with (home / "noise").open("wb+") as noise:
        try:
            for host in range(HOSTS):
                command = [
                    sys.executable, "-m", "regrow", "run", "--nnodes", str(HOSTS), "--node-rank", str(host),
                    "--rdzv-endpoint", f"{lab.address(0)}:29400", "--host-addr", lab.address(host),
                    "--nproc-per-node", "1", "--spares", str(spares), "--snapshot-every", "1",
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=5, help="how much to measure; 1 for a quick look")
    args = parser.parse_args()
    missing = why_not()
    if missing:
        say(f"skipped: {missing}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    figures: list[Figure] = []

    def add(name: str, values: list[float], bound: str = "", holds: Any = lambda m: True) -> None:
        figures.append(Figure(name, values, bound, holds))
        say(f"  {figures[-1].line()}")

    say(f"{'figure':44}{'median':>9}   {'spread':24}{'bound':>16}")
    lab = Lab(HOSTS)
    try:
        for host in range(HOSTS):
            lab.limit(host, SLOW_MBIT_S)
        ratios = step_ratios(lab, args.cycles, *WAITING)
        add("step_s", ratios["step_s"])
        add("snapshot_step_ratio", ratios["scheduled"], "at most 1.03", lambda m: m <= 1.03)
        add("unscheduled_step_ratio", ratios["unscheduled"])
        add("blocking_step_ratio", ratios["blocking"], "at least 1.10", lambda m: m >= 1.10)
        computing = step_ratios(lab, min(args.cycles, 2), *COMPUTING)
        add("step_s_computing", computing["step_s"])
        for mode in ("snapshot", "unscheduled", "blocking"):
            add(f"{mode}_step_ratio_computing", computing["scheduled" if mode == "snapshot" else mode])
    finally:
        lab.close()
    return conclude(OUT, {figure.name: figure.to_json() for figure in figures}, figures)


if __name__ == "__main__":
    sys.exit(main())
