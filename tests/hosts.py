"""Hosts for a test: network namespaces, with agents, workers and an etcd in them, that can be cut off and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

import etcd_cluster
from regrow import events, testing

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from lab import Lab, why_not

__all__ = ["Hosts", "Network", "missing"]

DEADLINE_S = 90.0
DEAD_AFTER_S = 4.0


def missing() -> str:
    """Return what is not here that such tests need."""
    return why_not() or ("" if etcd_cluster.INSTALLED else etcd_cluster.MISSING)


class Network:
    """So many hosts, and one more with an etcd that all can reach."""

    def __init__(self, directory: Path, hosts: int) -> None:
        self.lab = Lab(hosts + 1)
        self._etcd: subprocess.Popen[bytes] | None = None
        try:
            address = self.lab.address(hosts)
            words = ["etcd", "--data-dir", str(directory / "etcd")]
            for kind, port in (("client", 2379), ("peer", 2380)):
                url = f"http://{address}:{port}"
                words += [f"--listen-{kind}-urls", url]
                words += ["--advertise-client-urls" if kind == "client" else "--initial-advertise-peer-urls", url]
            words += ["--initial-cluster", f"default=http://{address}:2380"]
            with (directory / "etcd.log").open("wb") as log:
                self._etcd = subprocess.Popen(self.lab.on(hosts, words), stdout=log, stderr=log)
            self.store = f"etcd://{address}:2379"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()
        self.lab.close()


class Hosts:
    """One job. Its script writes and waits for files in ``out`` (``--wait``), so that a test can act in between."""

    def __init__(self, network: Network, directory: Path, hosts: int, script: Path, *args: str) -> None:
        self._network = network
        self._hosts = hosts
        self._directory = directory
        self._script = script
        self._args = args
        self._agents: list[subprocess.Popen[bytes]] = []
        self.out = directory / "out"

    def start(self, count: int, *, faults: list[testing.Fault], standby: bool = False) -> None:
        """Start agents on the next hosts."""
        for number in range(len(self._agents), len(self._agents) + count):
            command = [sys.executable, "-m", "regrow", "run", "--nnodes", str(self._hosts)]
            command += ["--rdzv-id", self._directory.name, "--store", self._network.store, "--spares", "1"]
            command += ["--standby"] if standby else ["--node-rank", str(number)]
            command += ["--dead-after", str(DEAD_AFTER_S), "--host-addr", self._network.lab.address(number)]
            command += ["--log-dir", str(self._log(number)), str(self._script), *self._args, "--out", str(self.out)]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "REGROW_TOKEN": "secret"}
            environ["REGROW_FAULTS"] = testing.encode(faults)
            with self._said(number).open("wb") as said:
                on_host = self._network.lab.on(number, command)
                self._agents.append(
                    subprocess.Popen(on_host, env=environ, stdout=said, stderr=said, start_new_session=True)
                )

    def _log(self, number: int) -> Path:
        return self._directory / f"host{number}"

    def _said(self, number: int) -> Path:
        return self._directory / f"host{number}.out"

    def output(self) -> str:
        """Return what all agents said."""
        return "\n".join(self._said(number).read_text() for number in range(len(self._agents)))

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return what all agents wrote down, by time."""
        found = [event for number in range(len(self._agents)) for event in events.read(self._log(number))]
        return sorted((event for event in found if event["event"] == name), key=lambda event: event["t"])

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, f"{what} did not come\n{self.output()[-20000:]}"
            time.sleep(0.05)
        return found

    def arrive(self, step: int, ranks: int) -> None:
        """Wait until all ranks wait in a step."""
        self.until(f"step {step}", lambda: len([*self.out.glob(f"at-{step}-*")]) == ranks)

    def go(self, step: int) -> None:
        (self.out / f"go-{step}").touch()

    def leader(self) -> int:
        """Return the node that leads."""
        return int(self.events("leader")[-1]["node"])

    def homes(self) -> list[int]:
        """Return the node of each rank."""
        return list(self.events("generation")[-1]["homes"])

    def host_of(self, node: int) -> int:
        """Return the host that is a node: standbys are numbered as they come."""
        texts = [self._said(number).read_text() for number in range(len(self._agents))]
        return next(number for number, text in enumerate(texts) if f"this is node {node}," in text)

    def processes(self, number: int) -> list[psutil.Process]:
        agent = psutil.Process(self._agents[number].pid)
        return [agent, *agent.children(recursive=True)]

    def kill(self, *numbers: int) -> None:
        """``kill -9`` of all that runs on some hosts."""
        for process in [process for number in numbers for process in self.processes(number)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_workers(self, ranks: int) -> None:
        """``kill -9`` of everyone who holds a rank."""
        for rank in range(ranks):
            os.kill(int((self.out / f"pid{rank}").read_text()), signal.SIGKILL)

    def wait(self) -> list[int]:
        """Return how the agents ended."""
        self.until("the end", lambda: all(agent.poll() is not None for agent in self._agents))
        return [agent.returncode for agent in self._agents]

    def digests(self, ranks: int) -> list[str]:
        return [json.loads((self.out / f"rank{rank}.json").read_text())["digest"] for rank in range(ranks)]

    def close(self) -> None:
        for number, agent in enumerate(self._agents):
            if agent.poll() is None:
                self.kill(number)
            agent.wait()
