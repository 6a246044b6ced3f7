"""A host that is cut off, in a network of its own: nothing comes from it any more, and nothing says so."""

import os
import shutil
import signal
import subprocess
import time

import pytest

import etcd_cluster
from hosts_harness import DEAD_AFTER_S, NOISE_S, Hosts
from lab import Lab, why_not

HOSTS, STORE = 3, 3


@pytest.fixture
def lab():
    if missing := why_not():
        pytest.skip(missing)
    made = Lab(HOSTS + 1)
    yield made
    made.close()


@pytest.fixture(params=["in the first agent", "in etcd"])
def hosts(request, tmp_path, lab):
    etcd = meet = None
    if request.param == "in etcd":
        if not etcd_cluster.INSTALLED:
            pytest.skip(etcd_cluster.MISSING)
        address = f"{lab.address(STORE)}:2379"
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        words = ["etcd", "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", f"http://{address}"]
        words += ["--advertise-client-urls", f"http://{address}", "--listen-peer-urls", "http://127.0.0.1:2380"]
        with (tmp_path / "etcd.log").open("w") as log:
            etcd = subprocess.Popen([*guard, *lab.on(STORE, words)], stdout=log, stderr=log)
        meet = ["--store", f"etcd://{address}", "--store-timeout", "2", "--rdzv-id", f"cut{os.getpid()}"]
    made = Hosts(tmp_path, meet, lab)
    try:
        yield made
    finally:
        made.close()
        if etcd is not None:
            etcd.kill()
            etcd.wait()


def lost_after_s(hosts, node, since_t, count):
    lost = hosts.jobs[0].until(lambda: found if len(found := hosts.events("host_lost")) == count else None, "the loss")
    assert lost[-1]["host"] == node
    return lost[-1]["t"] - since_t


def test_no_rank_has_two_holders_while_its_host_cannot_be_reached(hosts):
    jobs = [hosts.start("--node-rank", "0"), hosts.start("--node-rank", "1")]
    hosts.trained(2)
    leads = jobs[0].until(lambda: hosts.events("leader"), "a leader")[0]["node"]
    jobs.append(hosts.start("--standby"))
    hosts.joined(1)
    victim = leads if hosts.meet[0] == "--store" else 1  # who has the store cannot be spared
    old = jobs[0].note("assign", rank=victim)["pid"]
    cut_t = time.time()
    hosts.lab.lose(victim)
    assert DEAD_AFTER_S / 2 < lost_after_s(hosts, victim, cut_t, count=1) < DEAD_AFTER_S + NOISE_S
    mine = {"RANK": str(victim), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    jobs[0].until(lambda: len(jobs[0].notes("start", env=mine)) == 2, "another holder")
    assert old not in jobs[0].living()
    hosts.resumed(1, **{f"r{victim}": 1, f"r{1 - victim}": 0})
    hosts.lab.find(victim)
    jobs[victim].until(lambda: f"node {victim} is back, as a standby" in jobs[victim].err, "its return")

    stopped_t = time.time()
    jobs[2].signal(signal.SIGSTOP)
    assert DEAD_AFTER_S / 2 < lost_after_s(hosts, 2, stopped_t, count=2) < DEAD_AFTER_S + NOISE_S
    hosts.resumed(2, **{f"r{victim}": 2, f"r{1 - victim}": 0})
    jobs[2].signal(signal.SIGCONT)
    jobs[2].until(lambda: "node 2 is back, as a standby" in jobs[2].err, "its return")
    hosts.finish(*jobs)
