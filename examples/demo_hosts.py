"""Lose a worker, then a host that is cut off, then the host that leads, and show that the result is the same.

Four hosts with two workers each and two standbys, as network namespaces with addresses of their own; an etcd of three
members holds the membership. The state is sharded over all ranks: what a lost host had is in another one's memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from lab import Lab, why_not

HERE = Path(__file__).parent
HOSTS, STANDBYS, WORKERS, MEMBERS, STEPS = 4, 2, 2, 3, 90
DEAD_AFTER_S = 5
DEADLINE_S = 300.0


def say(text: str) -> None:
    """Print a heading."""
    print(f"\n=== {text}", flush=True)


def digest_of(out: Path) -> str:
    """Return the SHA-256 over all ranks' final states."""
    digests = [json.loads((out / f"rank{rank}.json").read_text())["digest"] for rank in range(HOSTS * WORKERS)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def undisturbed(home: Path) -> str:
    """Train on one host, with as many workers."""
    out = home / "out"
    command = [sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(HOSTS * WORKERS)]
    command += ["--log-dir", str(home / "logs"), str(HERE / "sharded.py"), "--steps", str(STEPS), "--out", str(out)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    return digest_of(out)


class Cluster:
    """Hosts with their agents, and the etcd that they agree in."""

    def __init__(self, lab: Lab, home: Path) -> None:
        self._lab = lab
        self._home = home
        self._token = secrets.token_hex(16)
        self._etcd: list[subprocess.Popen[Any]] = []
        self._agents: dict[int, subprocess.Popen[str]] = {}
        self._host_of: dict[int, int] = {}
        self.out = home / "out"

    def start(self) -> None:
        """Start etcd, then the agents."""
        first = HOSTS + STANDBYS
        members = [f"http://{self._lab.address(first + number)}" for number in range(MEMBERS)]
        for number, url in enumerate(members):
            words = ["etcd", "--name", f"m{number}", "--data-dir", str(self._home / f"etcd{number}")]
            words += ["--listen-client-urls", f"{url}:2379", "--advertise-client-urls", f"{url}:2379"]
            words += ["--listen-peer-urls", f"{url}:2380", "--initial-advertise-peer-urls", f"{url}:2380"]
            words += ["--initial-cluster", ",".join(f"m{n}={other}:2380" for n, other in enumerate(members))]
            with (self._home / f"etcd{number}.log").open("w") as log:
                command = self._lab.on(first + number, words)
                self._etcd.append(subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True))
        store = "etcd://" + ",".join(f"{url.removeprefix('http://')}:2379" for url in members)
        for host in range(HOSTS + STANDBYS):
            command = [sys.executable, "-m", "regrow", "run", "--nnodes", str(HOSTS), "--rdzv-id", "demo"]
            command += ["--store", store, "--nproc-per-node", str(WORKERS), "--spares", str(WORKERS)]
            command += ["--standby"] if host >= HOSTS else ["--node-rank", str(host)]
            command += ["--host-addr", self._lab.address(host), "--dead-after", str(DEAD_AFTER_S)]
            command += ["--log-dir", str(self._home / "logs"), str(HERE / "sharded.py"), "--steps", str(STEPS)]
            environment = {**os.environ, "REGROW_TOKEN": self._token}
            agent = subprocess.Popen(
                self._lab.on(host, [*command, "--out", str(self.out)]),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self._agents[host] = agent
            assert agent.stdout is not None
            threading.Thread(target=self._show, args=(host, agent.stdout), name=f"host-{host}", daemon=True).start()

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for something; everything ends if it does not come."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} did not come within {DEADLINE_S:.0f} s")
            if all(agent.poll() is not None for agent in self._agents.values()):
                raise RuntimeError(f"all agents have ended before {what}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        """Wait until rank 0 has done so many steps."""
        file = self.out / "step"
        self.until(f"step {step}", lambda: file.exists() and int(file.read_text() or 0) >= step)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what the agents have told."""
        found = []
        for path in (self._home / "logs").glob("events.*.jsonl"):
            found += [json.loads(line) for line in path.read_text().splitlines() if f'"{name}"' in line]
        return sorted((event for event in found if event["event"] == name), key=lambda event: event["t"])

    def kill_worker(self, rank: int) -> None:
        """``kill -9`` of the process that holds a rank now."""
        started = [each for each in self.events("worker_started") if each["rank"] == rank]
        os.kill(started[-1]["pid"], signal.SIGKILL)

    def _show(self, host: int, stream: IO[str]) -> None:
        """Print what an agent says, with its host; a standby learns its number when it joins."""
        for line in stream:
            if (found := re.search(r"this is node (\d+)|node (\d+) is back", line)) is not None:
                self._host_of[int(found.group(1) or found.group(2))] = host
            print(f"host {host} | {line}", end="", flush=True)

    def leader(self) -> int:
        """Return the host that leads."""
        return self._host_of[int(self.events("leader")[-1]["node"])]

    def kill_host(self, host: int) -> None:
        """``kill -9`` of an agent; its workers die with it."""
        os.killpg(self._agents[host].pid, signal.SIGKILL)

    def kill_member(self, number: int) -> None:
        """``kill -9`` of a member of etcd."""
        os.killpg(self._etcd[number].pid, signal.SIGKILL)

    def etcd_leader(self) -> int:
        """Return the member that the others follow."""
        for number in range(MEMBERS):
            address = self._lab.address(HOSTS + STANDBYS + number)
            words = ["etcdctl", "--endpoints", f"{address}:2379", "endpoint", "status", "--write-out", "json"]
            environment = {**os.environ, "ETCDCTL_API": "3"}
            command = self._lab.on(HOSTS, words)
            answer = subprocess.run(command, env=environment, check=True, capture_output=True, timeout=30)
            status = json.loads(answer.stdout)[0]["Status"]
            if status["leader"] == status["header"]["member_id"]:
                return number
        return 0

    def wait(self) -> None:
        """Wait for the agents that live to end."""
        self.until("the end", lambda: all((self.out / f"rank{r}.json").exists() for r in range(HOSTS * WORKERS)))
        for agent in self._agents.values():
            agent.wait(timeout=60)

    def close(self) -> None:
        """End whatever still runs."""
        for process in [*self._agents.values(), *self._etcd]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def disturbed(home: Path) -> str:
    """Train on the hosts, and lose some of them."""
    lab = Lab(HOSTS + STANDBYS + MEMBERS)
    cluster = Cluster(lab, home)
    try:
        cluster.start()
        cluster.until_step(15)
        say("kill -9 of rank 3's worker")
        cluster.kill_worker(3)
        cluster.until_step(30)
        victim = (cluster.leader() + 2) % HOSTS
        say(f"host {victim} is cut off: nothing that goes to it or comes from it arrives any more")
        before = len(cluster.events("generation"))
        lab.lose(victim)
        cluster.until("a new generation", lambda: len(cluster.events("generation")) > before)
        cluster.until_step(50)
        say(f"host {victim} can be reached again")
        lab.find(victim)
        cluster.until_step(60)
        leader, member = cluster.leader(), cluster.etcd_leader()
        say(f"kill -9 of host {leader}, which leads the agents, and of etcd's member {member}, which leads the others")
        cluster.kill_member(member)
        cluster.kill_host(leader)
        cluster.wait()
        return digest_of(cluster.out)
    finally:
        cluster.close()
        lab.close()


def main() -> int:
    """Train twice, and compare."""
    missing = why_not() or ("" if shutil.which("etcd") else "etcd is not installed")
    if missing:
        print(f"skipped: {missing}")
        return 0
    with tempfile.TemporaryDirectory(prefix="regrow-demo-") as name:
        home = Path(name)
        say(f"an undisturbed run: {HOSTS * WORKERS} workers on one host, {STEPS} steps")
        expected = undisturbed(home / "undisturbed")
        (home / "disturbed").mkdir()
        say(f"the same on {HOSTS} hosts with {WORKERS} workers each, and {STANDBYS} standbys")
        found = disturbed(home / "disturbed")
        say("what happened")
        subprocess.run([sys.executable, "-m", "regrow", "report", str(home / "disturbed" / "logs")], check=True)
    say("proof: weights and optimizer state of all ranks")
    print(f"undisturbed  sha256 {expected}\ndisturbed    sha256 {found}")
    same = expected == found
    print(f"final state identical to the undisturbed run: {'yes' if same else 'no'}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
