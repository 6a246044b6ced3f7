"""Whole hosts that are killed, stopped, cut off: several agents on this machine are as many hosts."""

import os
import signal
import time

import pytest

from agent_harness import AT_ONCE_S, Job
from hosts_harness import DEAD_AFTER_S, NOISE_S, Hosts, kill, noticed_s, signal_all


@pytest.fixture
def hosts(tmp_path):
    made = Hosts(tmp_path)
    yield made
    made.close()


def test_standby_takes_over(hosts):
    zero, one = hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1", nproc=2)
    standby = hosts.start("--standby", "--spares", "2", "--host-addr", "127.0.0.3", nproc=2)
    hosts.trained(3)
    standby.until(lambda: len(standby.events("spare_ready")) == 2, "warm spares")
    assert noticed_s(zero, kill(one)) < AT_ONCE_S
    hosts.resumed(1, r0=0, r1=1, r2=1)
    for rank in (1, 2):
        took = zero.note("assign", rank=rank, incarnation=1)
        env = took["assign"]["env"]
        assert took["role"] == "spare" and took["assign"]["replacement"]
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["GROUP_RANK"]) == (str(rank - 1), "2", "2")
        assert (took["record"], took["assign"]["host_addr"]) == (f"record of {rank}/0", "127.0.0.3")
    hosts.finish(zero, standby)
    assert "node 1 (its agent has ended) with ranks 1, 2 lost: replaced" in zero.err
    assert "ranks 1, 2 now on node 2 (generation 1)" in zero.err
    assert [event["generation"] for event in zero.events("generation")] == [1]
    assert "2 replaced on the way" in standby.err


def test_free_slots_take_over(hosts):
    zero, one = hosts.start("--slots", "3"), hosts.start("--node-rank", "1", nproc=2)
    hosts.trained(3)
    kill(one)
    hosts.resumed(1, r0=0, r1=1, r2=1)
    places = [zero.note("assign", rank=rank, incarnation=1)["assign"] for rank in (1, 2)]
    assert [(place["local_rank"], place["env"]["LOCAL_WORLD_SIZE"]) for place in places] == [(1, "3"), (2, "3")]
    hosts.finish(zero)


def test_without_room_the_others_wait_for_a_host(hosts):
    zero, one = hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1")
    hosts.trained(2)
    kill(one)
    zero.until(lambda: "no host has room for rank 1: waiting for one" in zero.err, "the sentence")
    world = zero.until(lambda: [n for n in zero.notes("world", rank=0) if n["world"]["homeless"]], "the news")
    assert (world[0]["world"]["homeless"], world[0]["world"]["phase"]) == ([1], "TRAINING")
    again = hosts.start("--node-rank", "1")
    hosts.resumed(1, r0=0, r1=1)
    hosts.finish(zero, again)
    assert zero.err.count("waiting for one") == 1 and zero.err.count("every rank has a host again") == 1
    assert "node 1 has joined; rank 1 now on node 1" in again.err
    assert [event["generation"] for event in zero.events("generation")] == [1]


def test_stopped_host_is_replaced_and_comes_back_as_standby(hosts):
    zero, one = hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1", nproc=2)
    hosts.start("--standby", nproc=2)
    hosts.trained(3)
    hosts.joined(1)
    stopped_t = time.time()
    signal_all(one, signal.SIGSTOP)
    assert DEAD_AFTER_S / 2 < noticed_s(zero, stopped_t) < DEAD_AFTER_S + NOISE_S
    hosts.resumed(1, r0=0, r1=1, r2=1)
    old = {note["pid"] for rank in (1, 2) for note in zero.notes("assign", rank=rank, incarnation=0)}
    before = len([note for note in zero.notes() if note["pid"] in old])
    signal_all(one, signal.SIGCONT)
    one.until(lambda: "node 1 is back, as a standby" in one.err, "its return")
    assert not old & set(zero.living())
    assert len([note for note in zero.notes() if note["pid"] in old]) == before, "they have done nothing more"
    assert len(one.events("let_go")) == 2 and one.events("fenced")
    standby = hosts.jobs[2]
    kill(standby)
    hosts.resumed(2, r0=0, r1=2, r2=2)
    assert zero.note("assign", rank=1, incarnation=2)["assign"]["env"]["GROUP_RANK"] == "1"
    hosts.finish(zero, one)


def test_workers_of_a_stopped_agent_end_before_others_hold_their_ranks(hosts):
    zero, one = hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1")
    standby = hosts.start("--standby")
    hosts.trained(2)
    hosts.joined(1)
    old = zero.note("assign", rank=1)["pid"]
    stopped_t = time.time()
    one.signal(signal.SIGSTOP)
    mine = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    zero.until(lambda: len(zero.notes("start", env=mine)) == 2, "another holder")
    assert old not in zero.living()
    assert DEAD_AFTER_S / 2 < noticed_s(zero, stopped_t) < DEAD_AFTER_S + NOISE_S
    hosts.resumed(1, r0=0, r1=1)
    one.signal(signal.SIGCONT)
    one.until(lambda: "node 1 is back, as a standby" in one.err, "its return")
    hosts.finish(zero, one, standby)


def test_two_hosts_at_once(hosts):
    jobs = [hosts.start("--node-rank", str(rank), nnodes="3") for rank in range(3)]
    standbys = [hosts.start("--standby", nnodes="3") for _ in range(2)]
    hosts.trained(3)
    hosts.joined(2)
    assert noticed_s(jobs[0], kill(jobs[1], jobs[2]), count=2) < AT_ONCE_S
    # one generation, unless the machine is so busy that they end far apart
    hosts.resumed(jobs[0].events("generation")[-1]["generation"], r0=0, r1=1, r2=1)
    hosts.finish(jobs[0], *standbys)
    assert len(jobs[0].events("generation")) <= 2
    assert sum(len(event["lost"]) for event in jobs[0].events("generation")) == 2


def test_a_host_is_lost_during_anothers_recovery(hosts):
    jobs = [hosts.start("--node-rank", str(rank), nnodes="3") for rank in range(3)]
    standby = hosts.start("--standby", nnodes="3", nproc=2)
    hosts.trained(3)
    hosts.joined(1)
    kill(jobs[1])
    jobs[0].until(lambda: jobs[0].events("generation"), "the first loss")
    kill(jobs[2])
    hosts.resumed(2, r0=0, r1=1, r2=1)
    hosts.finish(jobs[0], standby)
    assert [event["generation"] for event in jobs[0].events("generation")] == [1, 2]


def test_a_host_is_lost_during_setup(hosts):
    zero = hosts.start("--node-rank", "0", plan={"do": {"0/0@-1": "stuck"}})
    one = hosts.start("--node-rank", "1")
    zero.note("act", rank=0, action="stuck")
    kill(one)
    zero.until(lambda: "waiting for one" in zero.err, "the sentence")
    zero.until(lambda: not zero.living(), "everybody's end: nobody sets up alone")
    again = hosts.start("--node-rank", "1")
    for rank in (0, 1):
        zero.note("steps done", rank=rank, incarnation=1)
    hosts.finish(zero, again)
    assert not any(note["assign"]["replacement"] for note in zero.notes("assign"))


def test_no_holder_is_left(hosts):
    zero, one = hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1")
    hosts.trained(2)
    kill(one)
    zero.until(lambda: "waiting for one" in zero.err, "the sentence")
    os.kill(zero.note("assign", rank=0)["pid"], signal.SIGKILL)
    zero.until(lambda: "no one holds the training state any more" in zero.err, "the sentence")
    again = hosts.start("--node-rank", "1")
    for rank, incarnation in ((0, 1), (1, 2)):
        zero.note("steps done", rank=rank, incarnation=incarnation)
    hosts.finish(zero, again)


def test_a_standby_may_leave(hosts):
    zero, one = hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1")
    standby = hosts.start("--standby")
    hosts.trained(2)
    hosts.joined(1)
    standby.signal(signal.SIGTERM)
    assert standby.wait() == 143
    standby.until(lambda: standby.events("host_lost"), "its leaving")
    hosts.finish(zero, one)
    assert not zero.events("generation")


def test_hosts_beyond_the_world_are_standbys_up_to_the_most(hosts):
    zero = hosts.start(nnodes="1:2")
    hosts.trained(1)
    more = hosts.start(nnodes="1:2")
    hosts.joined(1)
    refused = hosts.start(nnodes="1:2")
    assert refused.wait() == 1
    assert "all 2 are already taken (with --standby it would wait for a loss)" in refused.err
    hosts.finish(zero, more)
    assert [note["rank"] for note in zero.notes("assign")] == [0]


def test_a_stopped_agent_of_a_lone_host_harms_nobody(tmp_path):
    job = Job(tmp_path, "--nproc-per-node", "1", plan={"gate": True})
    try:
        pid = job.note("steps done", rank=0)["pid"]
        job.signal(signal.SIGSTOP)
        time.sleep(1.5)
        job.signal(signal.SIGCONT)
        time.sleep(0.5)
        assert pid in job.living()
        job.open_gate()
        assert job.wait() == 0, job.err
    finally:
        job.signal(signal.SIGCONT) if job.poll() is None else None
        job.kill()
