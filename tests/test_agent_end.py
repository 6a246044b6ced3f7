"""However the agent ends, nothing of the job is left."""

import os
import signal
import socket
import struct
import time
from pathlib import Path

import pytest

from agent_harness import Job


@pytest.fixture
def start(tmp_path):
    jobs = []

    def starter(*words, **options):
        jobs.append(Job(tmp_path, *words, **options))
        return jobs[-1]

    yield starter
    for job in jobs:
        job.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_all(start, number):
    job = start("--nproc-per-node", "2", "--spares", "1", plan={"gate": True})
    job.until(lambda: job.events("spare_ready"), "a spare")
    home = Path(job.note("assign", rank=0)["assign"]["small_state_path"]).parent
    job.signal(number)
    assert job.wait() == 128 + number
    assert f"stopped by {number.name}" in job.err
    assert [event["signal"] for event in job.events("signal")] == [number.name]
    assert not home.exists()
    job.assert_clean()


def test_workers_that_ignore_sigterm_are_killed_after_the_grace(start):
    job = start("--nproc-per-node", "1", "--shutdown-timeout", "1", plan={"gate": True, "ignore_sigterm": True})
    job.note("steps done", rank=0)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_clean()


def test_second_signal_does_not_wait(start):
    job = start("--nproc-per-node", "1", "--shutdown-timeout", "300", plan={"gate": True, "ignore_sigterm": True})
    job.note("steps done", rank=0)
    job.signal(signal.SIGINT)
    job.until(lambda: "workers are asked to end" in job.err, "the first signal")
    job.signal(signal.SIGINT)
    assert job.wait() == 130
    job.assert_clean()


def test_killed_agent_takes_its_workers_along_and_the_next_one_sweeps_up(start):
    job = start("--nproc-per-node", "2", "--spares", "1", plan={"gate": True})
    job.until(lambda: job.events("spare_ready"), "a spare")
    home = Path(job.note("assign", rank=0)["assign"]["small_state_path"]).parent
    job.signal(signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.until(lambda: not job.living(), "the workers' end")
    assert home.exists()
    assert start(plan={"no_init": True}).wait() == 0
    assert not home.exists()


def test_stopped_worker_does_not_hold_up_the_end(start):
    job = start("--nproc-per-node", "2", plan={"gate": True})
    os.kill(job.note("steps done", rank=1)["pid"], signal.SIGSTOP)
    job.signal(signal.SIGTERM)
    assert job.wait() == 143
    job.assert_clean()


def frame(text):
    return struct.pack("!II", len(text), 0) + text


def test_strangers_are_refused(start):
    job = start("--nproc-per-node", "1", plan={"gate": True})
    assign = job.note("assign", rank=0)["assign"]
    path = assign["env"]["REGROW_AGENT"]
    token = assign["env"]["REGROW_TOKEN"]
    hellos = [
        b'{"type":"hello","token":"guess","role":"worker"}',
        b'{"type":"hello","role":"worker"}',
        b'{"type":"heartbeat"}',
        b"not json",
        b'{"type":"hello","token":"%s","role":"worker","rank":0}' % token.encode(),  # not a process of this agent
    ]
    for hello in hellos:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect(path)
            stranger.sendall(frame(hello))
            assert stranger.recv(1) == b""
    job.open_gate()
    assert job.wait() == 0, job.err
    assert not job.events("worker_lost")


def test_stopped_agent_does_not_blame_its_workers(start):
    job = start("--nproc-per-node", "2", plan={"gate": True})
    for rank in (0, 1):
        job.note("steps done", rank=rank)
    job.signal(signal.SIGSTOP)
    time.sleep(1.5)  # longer than dead_after: nothing else can show that the silence is forgiven
    job.signal(signal.SIGCONT)
    job.open_gate()
    assert job.wait() == 0, job.err
    assert not job.events("worker_lost")
