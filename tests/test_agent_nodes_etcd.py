"""Two nodes whose store is an etcd, members of which are lost meanwhile."""

import os
import re
import signal
import time
import uuid

import pytest

from agent_harness import AT_ONCE_S, Job
from harness import check
from regrow import testing

TOKEN = {"REGROW_TOKEN": "a secret of both"}


@pytest.fixture
def start(tmp_path, etcd):
    jobs = []
    name = uuid.uuid4().hex

    def starter(*words, rank=None, nnodes=2, timeout_s=6, **options):
        directory = tmp_path / f"agent{len(jobs)}"
        directory.mkdir()
        options = {"env": TOKEN, "notes": tmp_path, "plan": {"gate": True}, **options}
        flags = ["--nnodes", str(nnodes), "--store", etcd.url, "--store-timeout", str(timeout_s), "--dead-after", "5"]
        flags += ["--rdzv-id", name] if nnodes > 1 else []
        flags += [] if rank is None else ["--node-rank", str(rank)]
        jobs.append(Job(directory, *flags, *words, **options))
        return jobs[-1]

    yield starter
    for job in jobs:
        job.kill()


@pytest.fixture
def left(etcd):
    """The keys of runs that were not there before."""

    def keys():
        found = etcd.ask(0, "kv/range", key="L3JlZ3Jvdy8=", range_end="L3JlZ3JvdzA=", keys_only=True)
        return {kv["key"] for kv in found.get("kvs", [])}

    before = keys()
    return lambda: keys() - before


@pytest.mark.parametrize("role", ["leader", "follower"])
def test_workers_are_healed_while_a_member_is_lost(start, etcd, left, role):
    zero = start("--nproc-per-node", "2", rank=0)
    one = start("--host-addr", "127.0.0.2", "--spares", "1", rank=1)
    assert one.note("assign", rank=2)["assign"]["host_addr"] == "127.0.0.2"
    one.until(lambda: one.events("spare_ready"), "a spare")
    pids = {rank: zero.note("steps done", rank=rank)["pid"] for rank in (0, 1, 2)}
    leader = etcd.leader()
    etcd.kill(leader if role == "leader" else (leader + 1) % 3)
    os.kill(pids[2], signal.SIGKILL)
    for rank in (0, 1, 2):
        zero.note("resumed", rank=rank, generation=1)
    os.kill(pids[0], signal.SIGKILL)
    for rank in (0, 1, 2):
        zero.note("resumed", rank=rank, generation=2)
    zero.open_gate()
    assert (zero.wait(), one.wait()) == (0, 0), zero.err + one.err
    assert re.search(r"rank 2 died \(SIGKILL\) at step \d: generation 1, spare takes over", one.err)
    assert re.search(r"rank 0 died \(SIGKILL\) at step \d: generation 2", zero.err)
    assert zero.note("assign", rank=2, incarnation=1)["record"] == "record of 2/0"
    zero.assert_clean()
    one.assert_clean()
    etcd.until_whole()
    assert not left()


def test_nodes_without_ranks_are_numbered_as_they_come_and_a_run_of_the_same_name_may_follow(start, left):
    for runs in (1, 2):
        jobs = [start(plan={}) for _ in range(2)]
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
        assert sorted(one["rank"] for one in jobs[0].notes("end")) == sorted([0, 1] * runs)
    assert not left()


@pytest.mark.parametrize("who", ["leader", "other"])
def test_a_lost_host_is_replaced_whichever_it_is(start, left, who):
    jobs = [start(rank=rank) for rank in (0, 1)]
    for rank in (0, 1):
        jobs[0].note("steps done", rank=rank)
    standby = start("--standby")
    standby.until(lambda: standby.events("host_joined"), "the standby")
    leads = jobs[0].until(lambda: next((n for n in (0, 1) if jobs[n].events("leader")), -1) + 1, "a leader") - 1
    victim = leads if who == "leader" else 1 - leads
    living, killed_t = jobs[1 - victim], time.time()
    jobs[victim].signal(signal.SIGKILL)
    jobs[victim].wait()
    living.note("resumed", rank=victim, incarnation=1, generation=1)
    living.note("resumed", rank=1 - victim, incarnation=0, generation=1)
    lost = [*living.events("host_lost"), *standby.events("host_lost")]
    assert [event["host"] for event in lost] == [victim] and lost[0]["t"] - killed_t < AT_ONCE_S
    living.open_gate()
    assert (living.wait(), standby.wait()) == (0, 0), living.err + standby.err
    living.assert_clean()
    epochs = [event["epoch"] for job in (*jobs, standby) for event in job.events("leader")]
    assert sorted(epochs) == ([1, 2] if who == "leader" else [1])
    assert not left()


def test_a_run_goes_on_when_etcd_is_back(start, etcd):
    job = start(nnodes=1)
    job.note("steps done", rank=0)
    for member in (0, 1):
        etcd.kill(member)
    job.until(lambda: job.events("fenced"), "the lease's end")
    job.until(lambda: not job.living(), "the worker's end")
    for member in (0, 1):
        etcd.start(member)
    job.note("steps done", rank=0, incarnation=1)
    job.open_gate()
    assert job.wait() == 0, job.err
    assert "node 0 is back, as a standby" in job.err


def test_signal_to_one_agent_ends_the_other(start, left):
    jobs = [start(rank=rank) for rank in (0, 1)]
    for rank in (0, 1):
        jobs[0].note("steps done", rank=rank)
    jobs[0].signal(signal.SIGTERM)
    assert [job.wait() for job in jobs] == [143, 143], jobs[0].err + jobs[1].err
    assert "node 0: stopped by SIGTERM" in jobs[1].err
    jobs[0].assert_clean()
    assert not left()


def test_without_a_majority_the_nodes_end_their_workers(start, etcd):
    job = start("--rdzv-conf", "join_timeout=6", nnodes=1, timeout_s=4)
    job.note("steps done", rank=0)
    etcd.kill(0)
    etcd.kill(1)
    assert job.wait() == 1
    assert "and it could not come back" in job.err and "so this node ends its workers" in job.err
    job.assert_clean()


def test_an_etcd_that_is_not_there(start):
    job = start("--store", "etcd://127.0.0.1:1", "--store-timeout", "2", "--rdzv-conf", "join_timeout=0.5")
    assert job.wait() == 1
    assert job.err.startswith("regrow run: error: etcd cannot be reached within 0.5 s: ")


def test_an_address_that_is_not_this_hosts(start, left):
    job = start("--host-addr", "192.0.2.1")
    assert job.wait() == 2
    assert "--host-addr 192.0.2.1 is not an address of this host, which has " in job.err
    assert not left()


def test_training_is_healed_over_etcd(etcd, left):
    faults = testing.decode("kill rank=1 step=3 point=in_backward")
    check("--steps", "5", nproc=2, faults=faults, flags=("--store", etcd.url))
    assert not left()
