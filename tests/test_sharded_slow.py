"""Over a network too slow for a snapshot in every step, one is taken every few steps; and later in each again."""

import pytest

import harness
from hosts import Hosts, Network, missing
from regrow.testing import Fault
from test_sharded import SCRIPT

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

HOSTS = 2
SLOW_MBIT_S, FAST_MBIT_S = 100, 2000
WIDTH = ("--width", "384", "--steps", "90")
"""Snapshots of 2.7 MB, and a third of that in each of a step's collectives."""
DIES, FAST = 30, 40


def test_the_frequency_follows_the_network(tmp_path):
    """A rank dies while snapshots are rare: all go back to the last one, and nothing differs in the end."""
    expected = harness.undisturbed(*WIDTH, nproc=HOSTS, script=SCRIPT)
    network = Network(tmp_path, HOSTS)
    job = tmp_path / "job"
    job.mkdir()
    hosts = Hosts(network, job, HOSTS, SCRIPT, *WIDTH, "--idle-s", "0.08", "--wait", str(FAST))

    def frequencies():
        return [event["every"] for event in hosts.events("snapshot_frequency") if event["rank"] == 0]

    try:
        for host in range(HOSTS):
            network.lab.limit(host, SLOW_MBIT_S)
        hosts.start(HOSTS, faults=[Fault(point="in_backward", rank=1, step=DIES)])
        hosts.arrive(FAST, HOSTS)
        slow = frequencies()
        assert slow and slow[-1] > 1, hosts.output()
        for host in range(HOSTS):
            network.lab.limit(host, FAST_MBIT_S)
        hosts.go(FAST)
        assert hosts.wait() == [0, 0], hosts.output()
        assert frequencies()[-1] == 1, hosts.output()
        assert hosts.digests(HOSTS) == expected.digests(), hosts.output()
        (plan,) = hosts.events("plan")
        assert DIES - max(slow) * 2 <= plan["step"] <= DIES, hosts.output()
        assert "snapshots are taken every" in hosts.output()
    finally:
        hosts.close()
        network.close()
