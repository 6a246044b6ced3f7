"""Two agents on two loopback addresses are two nodes."""

import os
import re
import signal
import socket
import sys

import pytest

from agent_harness import Job
from harness import free_port

TOKEN = {"REGROW_TOKEN": "a secret of both"}


@pytest.fixture
def start(tmp_path):
    jobs = []

    def starter(*words, **options):
        directory = tmp_path / f"agent{len(jobs)}"
        directory.mkdir()
        options = {"env": TOKEN, "notes": tmp_path, **options}
        jobs.append(Job(directory, *words, **options))
        return jobs[-1]

    yield starter
    for job in jobs:
        job.kill()


@pytest.fixture
def port():
    return free_port()


def node(rank, port, nproc=1):
    words = ["--nnodes", "2", "--nproc-per-node", str(nproc), "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words += ["--dead-after", "2"]
    return words + ([] if rank is None else ["--node-rank", str(rank)])


def test_loss_on_either_node_is_healed_by_its_own_agent(start, port):
    zero = start(*node(0, port, nproc=2), plan={"gate": True})
    one = start(*node(1, port), "--host-addr", "127.0.0.2", "--spares", "1", plan={"gate": True})
    assert one.note("assign", rank=2)["assign"]["host_addr"] == "127.0.0.2"
    assert one.note("assign", rank=2)["assign"]["env"]["GROUP_RANK"] == "1"
    one.until(lambda: one.events("spare_ready"), "a spare")
    os.kill(one.note("steps done", rank=2)["pid"], signal.SIGKILL)
    for rank in (0, 1, 2):
        zero.note("resumed", rank=rank, generation=1)
    os.kill(zero.note("steps done", rank=0)["pid"], signal.SIGKILL)
    for rank in (0, 1, 2):
        zero.note("resumed", rank=rank, generation=2)
    zero.open_gate()
    assert (zero.wait(), one.wait()) == (0, 0), zero.err + one.err
    assert re.search(r"rank 2 died \(SIGKILL\) at step \d: generation 1, spare takes over", one.err)
    assert re.search(r"rank 0 died \(SIGKILL\) at step \d: generation 2", zero.err)
    assert zero.note("assign", rank=2, incarnation=1)["record"] == "record of 2/0"
    zero.assert_clean()
    one.assert_clean()


def test_nodes_without_ranks_are_numbered_as_they_come(start, port):
    jobs = [start(*node(None, port), plan={}) for _ in range(2)]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
    assert sorted(one["rank"] for one in jobs[0].notes("end")) == [0, 1]


@pytest.mark.parametrize("victim", [0, 1])
def test_signal_to_one_agent_ends_the_other(start, port, victim):
    jobs = [start(*node(rank, port), plan={"gate": True}) for rank in (0, 1)]
    for rank in (0, 1):
        jobs[0].note("steps done", rank=rank)
    jobs[victim].signal(signal.SIGTERM)
    assert [job.wait() for job in jobs] == [143, 143], jobs[0].err + jobs[1].err
    assert f"node {victim}: stopped by SIGTERM" in jobs[1 - victim].err
    jobs[0].assert_clean()


def test_loss_of_the_host_of_the_store_ends_the_others_with_a_sentence(start, port):
    zero, one = (start(*node(rank, port), plan={"gate": True}) for rank in (0, 1))
    for rank in (0, 1):
        zero.note("steps done", rank=rank)
    zero.signal(signal.SIGKILL)
    zero.wait()
    assert one.wait() == 1
    assert "the connection to node 0 is lost (Connection refused), so this node ends its workers" in one.err
    one.assert_clean()


def test_node_that_cannot_start_its_workers_ends_the_run(start, port):
    zero = start(*node(0, port), plan={"gate": True})
    one = start(*node(1, port), plan={"gate": True}, env={**TOKEN, "PYTHON_EXEC": "/no/such/python"})
    assert (zero.wait(), one.wait()) == (1, 1)
    assert "cannot execute /no/such/python: No such file or directory" in one.err
    assert "node 1: its agent cannot go on" in zero.err
    zero.assert_clean()


def test_wrong_token_is_refused(start, port):
    zero = start(*node(0, port), plan={"gate": True})
    one = start(*node(1, port), plan={"gate": True}, env={"REGROW_TOKEN": "another"})
    assert one.wait() == 1
    assert "refused this node: the token is not this run's" in one.err
    assert not one.notes()
    zero.signal(signal.SIGTERM)
    assert zero.wait() == 143
    zero.assert_clean()


def test_port_in_use(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = start(*node(0, port))
        assert job.wait() == 1
        assert job.err == f"regrow run: error: node 0 cannot listen at 127.0.0.1:{port}: Address already in use\n"
        job = start("--master-port", str(port))
        assert job.wait() == 1
        assert job.err == f"regrow run: error: port {port} cannot be used: Address already in use\n"


def test_endpoint_that_nobody_serves(start, port):
    job = start(*node(1, port), "--rdzv-conf", "join_timeout=0.5")
    assert job.wait() == 1
    expected = f"regrow run: error: node 0 at 127.0.0.1:{port} cannot be reached within 0.5 s: Connection refused\n"
    assert job.err == expected


def test_missing_node(start, port):
    job = start(*node(0, port), "--rdzv-conf", "join_timeout=0.5")
    assert job.wait() == 1
    assert "only 1 of 2 nodes joined within 0.5 s (missing: node 1)" in job.err


def test_place_taken_twice_and_numbers_that_differ(start, port):
    zero = start("--nnodes", "3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", "0")
    one = start("--nnodes", "3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", "1")
    again = start("--nnodes", "3", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", "1")
    either = again.until(lambda: next((job for job in (one, again) if job.poll() is not None), None), "a refusal")
    assert "node rank 1 is already taken" in either.err
    odd = start("--nnodes", "4", "--rdzv-endpoint", f"127.0.0.1:{port}", "--node-rank", "2")
    for job in (zero, odd):
        assert job.wait() == 1
        assert "node 2 was started with --nnodes 4, node 0 with 3" in job.err


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is a local address on Linux only")
def test_endpoint_of_another_host(start, port):
    job = start("--nnodes", "2", "--node-rank", "0", "--master-addr", "192.0.2.1", "--master-port", str(port))
    assert job.wait() == 1
    assert "node 0 cannot listen at 192.0.2.1" in job.err
