"""What the processes of a running job listen at, and what becomes of strangers who find it.

The ports are found by looking at all processes of the job: none can be forgotten.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

import harness
import ports

SCRIPTS = Path(__file__).parent / "scripts"
LAB = Path(__file__).parent.parent / "examples"
UNTIL = "REGROW_TEST_UNTIL"
DEADLINE_S = 60.0
STEPS = ("--steps", "40")


class Running:
    """A job that trains until it is let go; ``run(env)`` runs it to its end."""

    def __init__(self, directory: Path, run: Callable[[dict[str, str]], list[harness.Job]]) -> None:
        self.token = f"token-{secrets.token_hex(8)}"
        self._done = directory / "done"
        self._pool = ThreadPoolExecutor(1)
        env = {UNTIL: str(self._done), "REGROW_TOKEN": self.token}
        self._jobs: Future[list[harness.Job]] = self._pool.submit(run, env)
        deadline = time.monotonic() + DEADLINE_S
        while not (directory / "step3").exists():
            assert not self._jobs.done(), self._jobs.result()[0].output
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.processes = ports.job_of(UNTIL, str(self._done))
        self.ports = ports.listening(self.processes)

    def descriptors(self) -> int:
        found = 0
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                found += process.num_fds()
        return found

    def end(self) -> list[harness.Job]:
        self._done.touch()
        jobs = self._jobs.result(DEADLINE_S + 60)
        assert [job.code for job in jobs] == [0] * len(jobs), "".join(job.output for job in jobs)
        return jobs

    def close(self) -> None:
        self._done.touch()
        self._pool.shutdown()


def check_secret(running: Running, jobs: list[harness.Job], seen: str) -> None:
    """The token is in nobody's arguments, and in nothing that is written."""
    assert running.token not in seen
    for job in jobs:
        assert running.token not in job.output
        for path in job.log_dir.rglob("*"):
            assert not path.is_file() or running.token.encode() not in path.read_bytes(), path


def arguments(running: Running) -> str:
    found = ""
    for process in running.processes:
        with contextlib.suppress(psutil.Error):
            found += " ".join(process.cmdline())
    assert "regrow" in found
    return found


def digests(jobs: list[harness.Job]) -> list[str]:
    ranks: dict[int, dict] = {}
    for job in jobs:
        ranks |= job.ranks
    return [ranks[rank]["digest"] for rank in sorted(ranks)]


def wrong_agent(port: int) -> subprocess.CompletedProcess[str]:
    """Join a running job with a token that is not its own."""
    command = [sys.executable, "-m", "regrow", "run", "--nnodes", "2", "--standby"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", str(SCRIPTS / "pipeline.py")]
    env = {**os.environ, "REGROW_TOKEN": "guess"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


KINDS = {
    "data parallel": ("train.py", 1, set()),
    "sharded": ("sharded.py", 1, {"courier"}),
    "pipeline": ("pipeline.py", 2, {"store", "keeper", "courier", "journal"}),
}


@pytest.mark.parametrize("kind", harness.cases("data parallel", "pipeline", rest=["sharded"]))
def test_strangers_at_every_port(tmp_path, kind):
    """On two hosts, a pipeline has every kind of port that there is."""
    script, hosts, served = SCRIPTS / KINDS[kind][0], KINDS[kind][1], KINDS[kind][2]
    expected = harness.undisturbed(*STEPS, nproc=2, script=script)
    port = harness.free_port()

    def run(env: dict[str, str]) -> list[harness.Job]:
        if hosts == 1:
            return [harness.run_job(*STEPS, nproc=2, script=script, env=env)]
        return harness.run_hosts(*STEPS, hosts=hosts, nproc=1, script=script, port=port, env=env)

    with contextlib.closing(Running(tmp_path, run)) as running:
        assert running.ports and all(ipaddress.ip_address(each.host).is_loopback for each in running.ports)
        seen, before = arguments(running), running.descriptors()
        with contextlib.closing(ports.Strangers(running.ports)) as strangers:
            if hosts > 1:
                wrong = wrong_agent(port)
                assert wrong.returncode == 1 and "Traceback" not in wrong.stderr
                assert wrong.stderr.splitlines()[-1].endswith("refused this node: the token is not this run's")
            ours = len(strangers.let_in)
            deadline = time.monotonic() + DEADLINE_S
            while running.descriptors() > before + ours + 10:  # a silent one each, and what a job has now and then
                assert time.monotonic() < deadline
                time.sleep(0.05)
            jobs = running.end()
    assert digests(jobs) == expected.digests()
    output = "".join(job.output for job in jobs)
    assert "generation 1" not in output and "Traceback" not in output, output
    for address, came_from in strangers.let_in.items():
        for what in ("noise", "a huge length", "a wrong token"):
            assert f"127.0.0.1:{came_from[what]} was sent away from the " in output, (address, what, output)
    assert {name for name in ("store", "keeper", "courier", "journal") if f"away from the {name}" in output} == served
    assert len(strangers.unanswered) == 2, "gloo's, one for each rank: open only while a group connects"
    assert len(strangers.let_in) + len(strangers.unanswered) == len(running.ports)
    if hosts > 1:
        assert output.count("was sent away from the store: its token is not this run's") == 2
    check_secret(running, jobs, seen)


@pytest.fixture
def lab() -> Iterator[tuple[Callable[..., list[str]], str]]:
    """A host with two networks."""
    sys.path.insert(0, str(LAB))
    from lab import Lab, why_not

    sys.path.remove(str(LAB))
    if reason := why_not():
        pytest.fail(reason)
    made = Lab(1)
    try:
        for words in (
            ("link", "add", "eth1", "type", "veth", "peer", "name", "eth1peer"),
            ("addr", "add", "10.78.0.1/24", "dev", "eth1"),
            ("link", "set", "eth1", "up"),
        ):
            subprocess.run(made.on(0, ["ip", *words]), check=True, timeout=30)
        yield lambda *command: made.on(0, command), made.address(0)
    finally:
        made.close()


def test_only_the_interface_that_was_named_is_listened_at(tmp_path, lab):
    on, address = lab
    script = SCRIPTS / "pipeline.py"
    port = harness.free_port()

    def host(number: int, env: dict[str, str]) -> harness.Job:
        flags = ("--nnodes", "2", "--node-rank", str(number), "--rdzv-endpoint", f"{address}:{port}")
        flags += ("--interface", "eth0")
        return harness.run_job(*STEPS, nproc=1, script=script, flags=flags, env=env, on=on)

    def run(env: dict[str, str]) -> list[harness.Job]:
        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(lambda number: host(number, env), range(2))]

    with contextlib.closing(Running(tmp_path, run)) as running:
        assert {each.host for each in running.ports} == {address}
        assert len(running.ports) == 1 + 2 + 2 * 3  # the store; keepers; courier, journal and gloo of each rank
        jobs = running.end()
    assert digests(jobs) == harness.undisturbed(*STEPS, nproc=2, script=script).digests()
    flags = ("--nnodes", "2", "--rdzv-endpoint", f"{address}:{port}", "--interface", "eth1")
    wrong = harness.run_job(script=script, flags=flags, env={"REGROW_TOKEN": "t"}, on=on)
    assert wrong.code == 1
    assert f"node 0 would listen at {address} ({address}), but --interface eth1 has 10.78.0.1" in wrong.output
