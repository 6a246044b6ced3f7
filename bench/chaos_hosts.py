"""Cut hosts off at random moments and let them be reached again, many times: no rank may ever have two holders.

Hosts are network namespaces; each has a real agent with a real worker, or waits as a standby. An etcd of three members
holds the membership. A cut is a black hole: nothing arrives, nothing is refused. Some are shorter than
``--dead-after``, most are longer; some hit the leader, some the host that just takes over from another, some one that
holds no rank. In the end what every process wrote down (``histories``) is judged, and the result is compared with the
undisturbed run's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import histories
from regrow import events

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
from lab import Lab, why_not  # noqa: E402

JOB = HERE / "chaos_job.py"
RANKS, STANDBYS, MEMBERS = 3, 2, 3
HOSTS = RANKS + STANDBYS
DEAD_AFTER_S = 2.0
PACE_S = 0.05
STEPS_PER_CUT, STEPS_MORE = 40, 200
SHOWN = 20
STUCK_S = 60.0
"""Within this time after the last cut all ranks must train again."""


class Stuck(Exception):
    """Something did not come."""


def digest_of(out: Path) -> str:
    digests = [json.loads((out / f"rank{rank}.json").read_text())["digest"] for rank in range(RANKS)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def undisturbed(home: Path, steps: int, deadline_s: float) -> str:
    out = home / "out"
    out.mkdir(parents=True)
    command = [sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(RANKS), "--log-dir", str(home / "logs")]
    command += [str(JOB), "--steps", str(steps), "--out", str(out)]
    with (home / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        if job.wait(deadline_s) != 0:
            raise Stuck("the undisturbed run failed")
    except subprocess.TimeoutExpired:
        raise Stuck(f"the undisturbed run did not end within {deadline_s:.0f} s") from None
    finally:
        end(job)
    return digest_of(out)


def end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Cluster:
    """The hosts with their agents, and the etcd that they agree in."""

    def __init__(self, lab: Lab, home: Path, steps: int) -> None:
        self._lab = lab
        self._home = home
        self._steps = steps
        self.out, self.logs = home / "out", home / "logs"
        self._etcd: list[subprocess.Popen[Any]] = []
        self._agents: list[subprocess.Popen[Any]] = []
        self._token = secrets.token_hex(16)
        self._read: dict[Path, int] = {}
        self._newest: dict[int, histories.Fact] = {}
        self.out.mkdir(parents=True)

    def start(self) -> None:
        members = [f"http://{self._lab.address(HOSTS + number)}" for number in range(MEMBERS)]
        for number, url in enumerate(members):
            words = ["etcd", "--name", f"m{number}", "--data-dir", str(self._home / f"etcd{number}")]
            words += ["--listen-client-urls", f"{url}:2379", "--advertise-client-urls", f"{url}:2379"]
            words += ["--listen-peer-urls", f"{url}:2380", "--initial-advertise-peer-urls", f"{url}:2380"]
            words += ["--initial-cluster", ",".join(f"m{n}={other}:2380" for n, other in enumerate(members))]
            self._etcd.append(self._run(HOSTS + number, words, f"etcd{number}.log"))
        store = "etcd://" + ",".join(f"{url.removeprefix('http://')}:2379" for url in members)
        for host in range(HOSTS):
            command = [sys.executable, "-m", "regrow", "run", "--nnodes", str(RANKS), "--rdzv-id", "chaos"]
            command += ["--store", store, "--store-timeout", "2", "--dead-after", f"{DEAD_AFTER_S:g}"]
            command += ["--standby"] if host >= RANKS else ["--node-rank", str(host)]
            command += ["--host-addr", self._lab.address(host), "--max-restarts", "100000", "--log-dir", str(self.logs)]
            command += [str(JOB), "--steps", str(self._steps), "--pace", str(PACE_S), "--out", str(self.out)]
            self._agents.append(self._run(host, command, f"host{host}.log"))

    def _run(self, host: int, command: list[str], log: str) -> subprocess.Popen[Any]:
        environment = {**os.environ, "REGROW_TOKEN": self._token, "OMP_NUM_THREADS": "1"}
        with (self._home / log).open("w") as file:
            return subprocess.Popen(
                self._lab.on(host, command), env=environment, stdout=file, stderr=file, start_new_session=True
            )

    def close(self) -> None:
        for process in [*self._agents, *self._etcd]:
            end(process)

    # ------------------------------------------------------------------ what is known of it

    def until(self, what: str, condition: Callable[[], bool], deadline_s: float = STUCK_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > deadline:
                raise Stuck(f"{what} did not come within {deadline_s:.0f} s")
            dead = [host for host, agent in enumerate(self._agents) if agent.poll() is not None]
            if dead:
                raise Stuck(f"the agent of host {dead[0]} ended before {what}")
            time.sleep(0.02)

    def newest(self) -> dict[int, histories.Fact]:
        """Return the newest step that each rank has done."""
        for path in self.out.glob("history.*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines = file.read().splitlines(keepends=True)
            for line in lines:
                if line.endswith(b"\n"):
                    self._read[path] = self._read.get(path, 0) + len(line)
                    fact = histories.Fact(**json.loads(line))
                    if fact.what == "done":
                        self._newest[fact.rank] = max(fact, self._newest.get(fact.rank, fact))
        return self._newest

    def trains_since(self, t: float) -> bool:
        """Whether all ranks have done a step since then, in one generation."""
        newest = self.newest()
        return (
            len(newest) == RANKS
            and min(fact.t for fact in newest.values()) > t
            and len({fact.generation for fact in newest.values()}) == 1
        )

    def step(self) -> int:
        return max((fact.step for fact in self.newest().values()), default=0)

    def host_of(self) -> dict[int, int]:
        """Return each node's host: a standby is given its number when it comes."""
        found = {}
        for host in range(HOSTS):
            number = re.search(r"this is node (\d+)", (self._home / f"host{host}.log").read_text())
            if number is not None:
                found[int(number.group(1))] = host
        return found

    def holders(self) -> dict[int, int]:
        """Return the host that each rank was last given to."""
        hosts, found = self.host_of(), {}
        for event in events.read(self.logs):
            if event["event"] in ("worker_started", "spare_assigned"):
                found[int(event["rank"])] = hosts[event["node"]]
        return found

    def leader(self) -> int:
        led = [event["node"] for event in events.read(self.logs) if event["event"] == "leader"]
        return self.host_of()[led[-1]]

    def finish(self, deadline_s: float) -> None:
        """Let it train to its end as fast as it can."""
        (self.out / "fast").touch()
        deadline = time.monotonic() + deadline_s
        for host, agent in enumerate(self._agents):
            try:
                code = agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise Stuck(f"the agent of host {host} did not end within {deadline_s:.0f} s") from None
            if code != 0:
                raise Stuck(f"the agent of host {host} ended with exit code {code}")

    def tail(self) -> str:
        parts = []
        for host in range(HOSTS):
            lines = (self._home / f"host{host}.log").read_text().splitlines()
            parts += [f"host {host} | {line}" for line in lines[-25:]]
        return "\n".join(parts)


class Weather:
    """Chooses whom to cut off, and for how long."""

    def __init__(self, cluster: Cluster, lab: Lab, dice: random.Random) -> None:
        self._cluster = cluster
        self._lab = lab
        self._dice = dice
        self.cuts = 0

    def strike(self, left: int) -> str:
        """Cut off one host, or one and then the one that takes over; return in words what was done."""
        holders = self._cluster.holders()
        idle = sorted(set(range(HOSTS)) - set(holders.values()))
        kinds = {"a holder": 5, "the leader": 3, "one without a rank": 1, "a holder, then its heir": 2 * (left > 1)}
        kind = self._dice.choices(list(kinds), list(kinds.values()))[0]
        match kind:
            case "the leader":
                victims = [self._cluster.leader()]
            case "one without a rank" if idle:
                victims = [self._dice.choice(idle)]
            case _:
                victims = [self._dice.choice(sorted(holders.values()))]
        short = self._dice.random() < 0.25 and not kind.endswith("heir")
        for_s = self._dice.uniform(0.2, DEAD_AFTER_S) if short else self._dice.uniform(1.2, 2.5) * DEAD_AFTER_S
        begun_t = time.monotonic()
        self._cut(victims[0])
        if kind.endswith("heir"):
            victims += self._heir(holders, victims[0], begun_t + for_s + DEAD_AFTER_S)
        time.sleep(max(0.0, begun_t + for_s - time.monotonic()))
        for victim in self._dice.sample(victims, len(victims)):
            self._lab.find(victim)
            time.sleep(self._dice.uniform(0, 0.3))
        who = " and ".join(f"host {victim}" for victim in victims)
        return f"{who} ({kind}) for {time.monotonic() - begun_t:.1f} s"

    def _cut(self, host: int) -> None:
        self._lab.lose(host)
        self.cuts += 1

    def _heir(self, before: dict[int, int], victim: int, until_t: float) -> list[int]:
        """Wait for the host that is given the victim's rank, and cut it off a moment later."""
        while time.monotonic() < until_t:
            now = self._cluster.holders()
            heirs = [now[rank] for rank, host in before.items() if host == victim and now[rank] != victim]
            if heirs:
                time.sleep(self._dice.uniform(0, 0.6))
                self._cut(heirs[0])
                return heirs[:1]
            time.sleep(0.02)
        return []


def disturbed(home: Path, args: argparse.Namespace, steps: int) -> tuple[str, list[str]]:
    """Train on the hosts while it storms; return the digest, and what the histories say against it."""
    lab = Lab(HOSTS + MEMBERS)
    cluster = Cluster(lab, home, steps)
    weather = Weather(cluster, lab, dice := random.Random(args.seed))
    begun_t = time.monotonic()
    try:
        cluster.start()
        cluster.until("the first step of all ranks", lambda: cluster.trains_since(begun_t), 120.0)
        cluster.until("all standbys", lambda: len(cluster.host_of()) == HOSTS)
        while weather.cuts < args.cuts:
            if cluster.step() > steps - STEPS_MORE // 2:
                raise Stuck(f"the job came to its end after {weather.cuts} cuts: the machine is too fast for them")
            time.sleep(dice.uniform(0, 0.8))
            first = weather.cuts + 1
            what, healed_t = weather.strike(args.cuts - weather.cuts), time.monotonic()
            cluster.until(f"the training after {what}", lambda since_t=healed_t: cluster.trains_since(since_t))
            fact = cluster.newest()[0]
            number = f"{first}" if first == weather.cuts else f"{first} and {weather.cuts}"
            trains = f"trains {time.monotonic() - healed_t:.1f} s later, generation {fact.generation}, step {fact.step}"
            print(f"cut {number}: {what}; {trains}", flush=True)
        cluster.finish(args.deadline)
    except Stuck as error:
        raise Stuck(f"{error}\n{cluster.tail()}") from None
    finally:
        cluster.close()
        lab.close()
    facts, told = histories.read(cluster.out), events.read(cluster.logs)
    generations = max(fact.generation for fact in facts)
    holders = len({(fact.rank, fact.incarnation, fact.pid) for fact in facts})
    leaders = sum(event["event"] == "leader" for event in told)
    print(
        f"{weather.cuts} cuts in {time.monotonic() - begun_t:.0f} s: {generations} generations, "
        f"{holders} holders of {RANKS} ranks one after another, {leaders} leaders"
    )
    return digest_of(cluster.out), histories.faults(facts) + histories.told_twice(told)


def main() -> int:
    """Train twice, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for each of the parts without a cut")
    args = parser.parse_args()
    missing = why_not() or ("" if shutil.which("etcd") else "etcd is not installed")
    if missing:
        print(f"skipped: {missing}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended, too
    steps = STEPS_PER_CUT * args.cuts + STEPS_MORE
    home = Path(tempfile.mkdtemp(prefix="regrow-chaos-hosts-"))
    try:
        expected = undisturbed(home / "undisturbed", steps, args.deadline)
        found, faults = disturbed(home / "disturbed", args, steps)
    except Stuck as error:
        print(f"FAILED: {error}\nlogs, events and histories: {home}", flush=True)
        return 1
    same = expected == found
    more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
    print("\n".join([*faults[:SHOWN], *more]) or "no rank ever had two holders", flush=True)
    print(f"final state identical to the undisturbed run: {'yes' if same else 'no'} (sha256 {found[:16]})", flush=True)
    if faults or not same:
        print(f"logs, events and histories: {home}")
        return 1
    shutil.rmtree(home)
    return 0


if __name__ == "__main__":
    sys.exit(main())
