"""Runs real jobs under ``regrow run`` and reads what they leave."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from regrow import events, testing

SCRIPT = Path(__file__).parent / "scripts" / "train.py"


def free_port() -> int:
    """Return a port that nobody listens at, and that no connection is given by chance before it is used."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def thorough(test: Callable[..., None]) -> Callable[..., None] | None:
    """Leave a test to `make test-all`: starting a job takes seconds, and all of them together too long."""
    return test if os.environ.get("REGROW_TEST_ALL") else None


def cases(*usual: Any, rest: Sequence[Any]) -> list[Any]:
    """Return a test's cases; the rest of them, for the same reason, in `make test-all` alone."""
    return [*usual, *(rest if os.environ.get("REGROW_TEST_ALL") else ())]


@dataclass
class Job:
    """What a finished job left."""

    code: int
    output: str
    ranks: dict[int, dict]
    log_dir: Path

    def digests(self) -> list[str]:
        return [self.ranks[rank]["digest"] for rank in sorted(self.ranks)]

    def events(self, name: str) -> list[dict]:
        return [event for event in events.read(self.log_dir) if event["event"] == name]

    def plans(self) -> list[str]:
        return ["\n".join(event["lines"]) for event in self.events("plan")]


def run_job(
    *script_args: str,
    nproc: int = 3,
    spares: int = 0,
    faults: list[testing.Fault] | None = None,
    flags: tuple[str, ...] = (),
    script: Path = SCRIPT,
    timeout_s: float = 120.0,
    env: dict[str, str] | None = None,
    log_dir: Path | None = None,
    on: Callable[..., list[str]] = lambda *command: [*command],
) -> Job:
    """Run a job to its end; everything it started is gone afterwards, also when it is late."""
    log_dir = log_dir if log_dir is not None else Path(tempfile.mkdtemp(prefix="regrow-test-log-"))
    out = log_dir / "out"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    if faults:
        environ["REGROW_FAULTS"] = testing.encode(faults)
    command = [
        sys.executable, "-m", "regrow", "run", "--nproc-per-node", str(nproc), "--spares", str(spares),
        "--log-dir", str(log_dir), *flags, str(script), *script_args, "--out", str(out),
    ]  # fmt: skip
    process = subprocess.Popen(
        on(*command), env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        ask_where_they_stand(log_dir)
        os.killpg(process.pid, signal.SIGTERM)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        raise AssertionError(f"the job did not end within {timeout_s} s\n{output[-30000:]}") from None
    ranks = {}
    for path in out.glob("rank*.json"):
        report = json.loads(path.read_text())
        ranks[report["rank"]] = report
    return Job(process.returncode, output, ranks, log_dir)


def ask_where_they_stand(log_dir: Path) -> None:
    """Let the processes of a job print their stacks; those without a handler ignore this signal."""
    for process in psutil.process_iter(["cmdline"]):
        if str(log_dir) in str(process.info["cmdline"]):
            process.send_signal(signal.SIGWINCH)
            time.sleep(0.2)


def run_hosts(
    *args: str,
    hosts: int,
    standbys: int = 0,
    flags: tuple[str, ...] = (),
    racks: tuple[str, ...] = (),
    port: int | None = None,
    env: dict[str, str] | None = None,
    own_flags: Callable[[int], tuple[str, ...]] = lambda host: (),
    **more,
) -> list[Job]:
    """Run one job on several hosts: agents of this machine, each with an address of its own. Standbys come last."""
    port = free_port() if port is None else port
    jobs: dict[int, Job] = {}

    def host(number: int) -> None:
        own = ("--nnodes", str(hosts), "--rdzv-endpoint", f"127.0.0.1:{port}")
        own += ("--node-rank", str(number)) if number < hosts else ("--standby",)
        own += ("--host-addr", f"127.0.0.{number + 1}")
        own += ("--snapshot-domain", racks[number]) if racks else ()
        own += own_flags(number)
        jobs[number] = run_job(*args, flags=(*own, *flags), env={"REGROW_TOKEN": "secret", **(env or {})}, **more)

    threads = [
        threading.Thread(target=host, args=(number,), name=f"host-{number}") for number in range(hosts + standbys)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(jobs) == [*range(hosts + standbys)], "a host's job did not end by itself"
    return [jobs[number] for number in range(hosts + standbys)]


@functools.cache
def undisturbed(*args: str, nproc: int, script: Path = SCRIPT) -> Job:
    """Return the job in which nothing failed, run once for all tests of a process."""
    job = run_job(*args, nproc=nproc, script=script)
    assert job.code == 0, job.output
    assert len(job.ranks) == nproc
    return job


def check(*args: str, nproc: int, faults: list[testing.Fault], deaths: int | range | None = None, **more) -> Job:
    """Run a job with faults, all of which are to strike unless ``deaths`` says how many, and compare its result."""
    script = more.pop("script", SCRIPT)
    expected = undisturbed(*args, nproc=nproc, script=script)
    job = run_job(*args, nproc=nproc, faults=faults, script=script, **more)
    assert job.code == 0, job.output
    assert job.digests() == expected.digests(), job.output
    number = len(faults) if deaths is None else deaths
    assert len(job.events("worker_lost")) in (number if isinstance(number, range) else [number]), job.output
    return job
