"""Whether the ladder takes the cheapest source: for each combination of those that survive, each is forced in turn.

A rank is killed at the same step of the same job, and what is measured is the time from the loss until every rank has
done that step, so that steps done again count. What was taken unforced must not be slower than the best one by more
than 15% and 0.05 s; all runs that took the same source count together, forced or not, since they did the same. Where
one measurement says otherwise, two more of each are made, and medians are compared.

Steps take a fixed time, as if computed on a device of their own. Prints a table, and writes ``bench/out/ladder.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from data_parallel import HERE, facts, running, say
from regrow import events
from regrow.plan import decision
from regrow.plan.ladder import candidates, choose
from regrow.rules import Source

SCRIPT = HERE / "ladder_job.py"
OUT = HERE / "out" / "ladder.json"
AT, STEPS, STEP_S = 15, 17, 0.12
PART, SLACK_S = 0.15, 0.05
AGAIN = 2
WITHIN_S = 120.0
REPLICA, MEMORY, PEER, REPLAY, ROLLBACK, DISK = (
    Source.REPLICA,
    Source.MEMORY,
    Source.PEER,
    Source.REPLAY,
    Source.ROLLBACK,
    Source.DISK,
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A kind of job, how often it keeps what, and the sources that it can have."""

    name: str
    kind: str
    ranks: int
    sources: tuple[Source, ...]
    hosts: int = 1
    disk_every: int = 9
    snapshot_every: int = 1
    checkpoint_every: int = 6
    least: int = 1
    """Combinations of fewer sources are left out: another scene has them."""

    def combinations(self) -> Iterator[tuple[Source, ...]]:
        for size in range(self.least, len(self.sources) + 1):
            yield from itertools.combinations(self.sources, size)

    def flags(self, there: Sequence[Source]) -> list[str]:
        """Return the flags by which a job can have these sources, and no others that flags can prevent."""
        found = ["--spares", str(len(self.dying(there)))]
        if self.kind in ("fsdp", "hsdp"):
            found += ["--snapshot-every", str(self.snapshot_every)]
        if self.hosts > 1:
            found += ["--snapshot-copies", "2" if PEER in there else "1"]
        if self.kind == "pipeline":
            found += ["--failure-domain", "rank" if REPLAY in there else "host"]
        return found

    def dying(self, there: Sequence[Source]) -> list[int]:
        """Return who dies: all replicas of a part, if none is to be left."""
        if REPLICA in self.sources and REPLICA not in there:
            return [*range(self.ranks)] if self.kind == "ddp" else [1, 1 + self.ranks // 2]
        return [1]


SCENES = (
    Scene(name="ddp", kind="ddp", ranks=2, sources=(REPLICA, DISK)),
    Scene(name="fsdp", kind="fsdp", ranks=2, sources=(MEMORY, DISK)),
    Scene(
        name="fsdp, rare snapshots", kind="fsdp", ranks=2, sources=(MEMORY, DISK),
        snapshot_every=8, disk_every=13, least=2,
    ),
    Scene(name="fsdp, 2 hosts", kind="fsdp", ranks=2, hosts=2, sources=(MEMORY, PEER, DISK)),
    Scene(name="hsdp", kind="hsdp", ranks=4, sources=(MEMORY, REPLICA, DISK)),
    Scene(name="pipeline", kind="pipeline", ranks=3, sources=(REPLAY, ROLLBACK, DISK)),
    Scene(
        name="pipeline, newer on storage", kind="pipeline", ranks=3, sources=(REPLAY, ROLLBACK, DISK),
        checkpoint_every=9, disk_every=13, least=3,
    ),
)  # fmt: skip


@dataclass
class Run:
    """One recovery."""

    seconds: float
    taken: str
    expected_s: dict[str, float]
    """Of each source that was there, by the planner."""


def recover(scene: Scene, there: Sequence[Source], force: Source | None) -> Run:
    """Run the job, kill, and see how long it takes until all have done again what they had begun."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        commands = [
            [*_agent(scene, there, force, home, host), *_job(scene, there, home)] for host in range(scene.hosts)
        ]
        _finish(commands)
        seen = [event for host in range(scene.hosts) for event in events.read(home / f"logs{host}")]
        first = min((event for event in seen if event["event"] == "plan"), key=lambda event: event["t"])
        told = [fact for rank in range(scene.ranks) for fact in facts(home / "out", rank)]
    (died_t,) = [fact["t"] for fact in told if fact.get("died")]
    done = [fact["t"] for fact in told if fact.get("step") == AT and fact["completed"] and fact["t"] > died_t]
    if len(done) < scene.ranks:
        raise RuntimeError(f"{scene.name}: {len(done)} of {scene.ranks} ranks have done step {AT}")
    then = decision.from_json(first)
    found = candidates(then.holdings, then.rules)
    expected = {each.name: each.seconds for each in found if each.plan is not None}
    return Run(max(done) - died_t, choose(found, then.rules).name, expected)


def _agent(scene: Scene, there: Sequence[Source], force: Source | None, home: Path, host: int) -> list[str]:
    words = [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(scene.ranks // scene.hosts),
        "--log-dir", str(home / f"logs{host}"), *scene.flags(there),
    ]  # fmt: skip
    if DISK in there:
        words += ["--ckpt-dir", str(home / "ckpt"), "--ckpt-every", str(scene.disk_every)]
    if force is not None:
        words += ["--force-source", force]
    if scene.hosts > 1:
        port = (home / "port").read_text() if (home / "port").exists() else str(_free_port())
        (home / "port").write_text(port)
        words += ["--nnodes", str(scene.hosts), "--rdzv-endpoint", f"127.0.0.1:{port}"]
        words += ["--node-rank", str(host), "--host-addr", f"127.0.0.{host + 1}"]
    return words


def _job(scene: Scene, there: Sequence[Source], home: Path) -> list[str]:
    without = [source.value for source in scene.sources if source not in there]
    return [
        str(SCRIPT), scene.kind, "--out", str(home / "out"), "--steps", str(STEPS), "--at", str(AT),
        "--die", *map(str, scene.dying(there)), "--step-s", str(STEP_S),
        "--checkpoint-every", str(scene.checkpoint_every), "--without", *without,
    ]  # fmt: skip


def _free_port() -> int:
    """Return a port that nobody listens at, and that no connection is given by chance before it is used."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _finish(commands: Sequence[list[str]]) -> None:
    os.environ["REGROW_TOKEN"] = "of this benchmark"
    with ExitStack() as stack:
        jobs = [stack.enter_context(running(command)) for command in commands]
        for job, command in zip(jobs, commands, strict=True):
            try:
                code = job.wait(WITHIN_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"not done within {WITHIN_S:.0f} s: {' '.join(command)}") from None
            if code != 0:
                raise RuntimeError(f"exit code {code}: {' '.join(command)}")


class Trial:
    """A combination of sources: what is taken unforced, and each of them forced."""

    def __init__(self, scene: Scene, there: tuple[Source, ...]) -> None:
        self.scene = scene
        self.there = there
        self.free: list[Run] = []
        self.forced: dict[Source, list[Run]] = {source: [] for source in there}

    def measure(self) -> None:
        self.free.append(recover(self.scene, self.there, None))
        for source in self.there if len(self.there) > 1 else ():
            run = recover(self.scene, self.there, source)
            if run.taken != source:
                raise RuntimeError(f"{self.scene.name}: forced {source}, and {run.taken} was taken")
            self.forced[source].append(run)

    @property
    def free_s(self) -> float:
        return statistics.median(run.seconds for run in self.free)

    def source_s(self, name: str) -> float:
        """Return how long a recovery from there takes."""
        runs = [*self.free, *(run for forced in self.forced.values() for run in forced)]
        return statistics.median(run.seconds for run in runs if run.taken == name)

    @property
    def holds(self) -> bool:
        """Whether only what is there was taken, and it was the cheapest."""
        if len(self.there) == 1:
            return {run.taken for run in self.free} == {*self.there}
        best_s = min(map(self.source_s, self.there))
        return all(self.source_s(run.taken) <= best_s * (1 + PART) + SLACK_S for run in self.free)

    def lines(self) -> list[str]:
        run = self.free[-1]
        verdict = "ok" if self.holds else "MISSED"
        lines = [f"{self.scene.name:28}{'+'.join(self.there):24}{self.free_s:8.2f}   took {run.taken:10}{verdict}"]
        if len(self.there) > 1:
            for source in self.there:
                expected = f"(expected {run.expected_s.get(source, float('nan')):.2f} of it)"
                forced_s = statistics.median(run.seconds for run in self.forced[source])
                lines.append(f"{'':28}  forced {source:15}{forced_s:8.2f}   {expected}")
        return lines

    def to_json(self) -> dict[str, object]:
        return {
            "job": self.scene.name,
            "there": [*self.there],
            "taken": [run.taken for run in self.free],
            "seconds": [run.seconds for run in self.free],
            "forced": {source: [run.seconds for run in runs] for source, runs in self.forced.items()},
            "expected": self.free[-1].expected_s,
            "holds": self.holds,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="only jobs whose name contains this")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(f"{'job':28}{'what survives':24}{'seconds':>8}")
    trials = []
    for scene in SCENES:
        if args.only is not None and args.only not in scene.name:
            continue
        for there in scene.combinations():
            trial = Trial(scene, there)
            trial.measure()
            for _ in range(AGAIN if len(there) > 1 and not trial.holds else 0):
                trial.measure()
            trials.append(trial)
            for line in trial.lines():
                say(line)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps([trial.to_json() for trial in trials], indent=1) + "\n")
    missed = [trial for trial in trials if not trial.holds]
    verdict = f"{len(missed)} of {len(trials)} combinations missed" if missed else f"all {len(trials)} hold"
    say(f"written to {OUT.relative_to(HERE.parent)}; {verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
