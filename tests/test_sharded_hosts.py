"""Sharded state of four ranks, over hosts with a network between them: the result is always the same bit by bit.

One job for each way to shard suffers in a row whatever a host can suffer. What needs four ranks on one host is here,
too, and shares the undisturbed runs.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

import harness
from hosts import Hosts, Network, missing
from regrow.testing import Fault

SCRIPT = Path(__file__).parent / "scripts" / "sharded.py"
RANKS, STANDBYS = 4, 2
check = partial(harness.check, script=SCRIPT)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    if why := missing():
        pytest.skip(why)
    network = Network(tmp_path_factory.mktemp("network"), RANKS + STANDBYS)
    yield network
    network.close()


@pytest.mark.parametrize("how", harness.cases("fsdp", "zero", rest=["hsdp"]))
def test_hosts(network, tmp_path_factory, how):
    """A worker is killed, two in the middle of a snapshot; a host is cut off, with snapshots of a step that the others

    do again, and comes back; two of different groups are killed at once, of which one leads; and then all workers are.
    """
    expected = harness.undisturbed("--how", how, "--steps", "10", nproc=RANKS, script=SCRIPT)
    faults = [
        Fault(point="in_backward", rank=3, step=2),
        Fault(point="snapshot_copy", rank=1, step=3),
        Fault(point="snapshot_send", rank=2, step=4),
    ]
    waits = [word for step in (5, 7, 8) for word in ("--wait", str(step))]
    args = ("--how", how, "--steps", "10", *waits, "--strike", "unlearn", "0", "5")
    hosts = Hosts(network, tmp_path_factory.mktemp(how), RANKS, SCRIPT, *args)
    try:
        hosts.start(RANKS, faults=faults)
        hosts.until("a leader", lambda: hosts.events("leader"))  # no standby is to lead
        hosts.start(STANDBYS, faults=[], standby=True)
        hosts.arrive(5, RANKS)
        assert len(hosts.events("worker_lost")) == 3, hosts.output()
        hosts.until("standbys", lambda: len({event["host"] for event in hosts.events("host_joined")}) >= STANDBYS)
        cut = next(host for host in (2, 3) if host != hosts.leader())  # not host 1, which keeps what rank 0 unlearns
        time.sleep(0.5)  # everyone has the snapshot of this step whole
        network.lab.lose(cut)
        hosts.go(5)

        hosts.arrive(7, RANKS)
        assert [event["host"] for event in hosts.events("host_lost")] == [cut], hosts.output()
        network.lab.find(cut)
        hosts.until("its return", lambda: cut in [event["host"] for event in hosts.events("host_joined")])
        nodes, leader = sorted(hosts.homes()), hosts.leader()
        other = next(node for node in nodes if nodes.index(node) // 2 != nodes.index(leader) // 2)
        killed = sorted([hosts.host_of(leader), hosts.host_of(other)])
        hosts.kill(*killed)
        hosts.go(7)

        hosts.arrive(8, RANKS)
        assert cut in hosts.homes(), hosts.output()
        hosts.kill_workers(RANKS)
        hosts.go(8)
        codes = hosts.wait()
        assert [number for number, code in enumerate(codes) if code != 0] == killed, hosts.output()
        assert hosts.digests(RANKS) == expected.digests(), hosts.output()
        plans = hosts.events("plan")
        assert len(hosts.events("training")) == 1 and all(plan["step"] > 0 for plan in plans), hosts.output()
        assert plans[-1]["step"] in (6, 7, 8)
        assert any("another host's memory has the part of" in plan["reason"] for plan in plans), hosts.output()
        if how != "hsdp":  # there a replica stood at the step that rank 0 unlearnt, and nobody went back
            assert any("done again since are passed over" in plan["reason"] for plan in plans), hosts.output()
    finally:
        hosts.close()
        for host in (2, 3):
            network.lab.find(host)


def test_hsdp_on_one_host():
    faults = [
        Fault(point="in_backward", rank=3, step=2, nth=3),
        Fault(point="after_update", rank=0, step=4),
        Fault(point="in_backward", rank=1, step=5),
        Fault(point="in_backward", rank=2, step=5),
    ]
    check("--how", "hsdp", "--steps", "10", nproc=RANKS, faults=faults, spares=2)


def test_an_optimizer_whose_state_is_sharded():
    """In the middle of its update too: the owners of parameters broadcast them."""
    faults = [
        Fault(point="in_backward", rank=1, step=2),
        Fault(point="step_end", rank=0, step=4),
        Fault(point="after_update", rank=2, step=5),
    ]
    check("--how", "zero", "--steps", "10", nproc=RANKS, faults=faults, spares=2)


def test_another_hosts_memory():
    """Rank 1 loses what its own host has of it; what the other host keeps of it is as good."""
    expected = harness.undisturbed("--how", "fsdp", "--steps", "10", nproc=RANKS, script=SCRIPT)
    faults = [Fault(point="after_update", rank=3, step=7)]
    jobs = harness.run_hosts(
        "--steps", "10", "--damage", "gone", hosts=2, nproc=2, spares=1, faults=faults, script=SCRIPT
    )
    assert [job.code for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    ranks = jobs[0].ranks | jobs[1].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    plans = [plan for job in jobs for plan in job.plans()]
    assert "restore  rank 1: the snapshot of step" in plans[0] and "from the memory of host 1" in plans[0], plans


def test_an_update_before_the_others_collectives():
    """It waits for a snapshot to be everywhere, while those who have to send it wait for this rank in a collective."""
    expected = harness.undisturbed("--how", "fsdp", "--steps", "10", nproc=RANKS, script=SCRIPT)
    jobs = harness.run_hosts("--steps", "10", "--ahead", hosts=2, nproc=2, script=SCRIPT)
    assert [job.code for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    ranks = jobs[0].ranks | jobs[1].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()


def test_a_lost_rack():
    """Agents, workers and their memory are gone: standbys take the ranks, the other rack has their snapshots.

    Without racks, each of hosts 2 and 3 would keep the other's snapshots; so each has one in the first rack.
    """
    expected = harness.undisturbed("--steps", "10", nproc=4, script=SCRIPT)
    args = ("--steps", "10", "--strike", "host", "2", "5", "--strike", "host", "3", "5")
    racks = ("a", "a", "b", "b", "b", "b")
    jobs = harness.run_hosts(*args, hosts=4, standbys=2, nproc=1, spares=1, script=SCRIPT, racks=racks)
    assert [job.code for job in jobs] == [0, 0, -9, -9, 0, 0], "".join(job.output for job in jobs)
    ranks = jobs[0].ranks | jobs[1].ranks | jobs[4].ranks | jobs[5].ranks
    assert [ranks[rank]["digest"] for rank in range(4)] == expected.digests()
    plans = [plan for job in jobs for plan in job.plans()]
    assert "another host's memory has the part of" in "".join(plans), plans
    first = jobs[:4]  # a standby has keepers of its own, and which of the two ranks it is given is left to chance
    kept = {event["rank"]: event["keepers"] for job in first for event in job.events("snapshot_keepers")[:1]}
    assert [kept[rank] for rank in range(4)] == [[2], [3], [0], [1]]
