"""One thread per process, as in a worker: sums come out the same everywhere, and tests leave each other room."""

import os
import select
import socket

import pytest

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture
def unanswered():
    """An address that neither takes a connection nor refuses it, like a host that is gone: its queue is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        held = []
        while True:
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(listener.getsockname())
            taken = select.poll()
            taken.register(held[-1], select.POLLOUT)
            if not taken.poll(200):
                break
        yield listener.getsockname()
        for each in held:
            each.close()


@pytest.fixture(scope="session")
def _etcd(tmp_path_factory):
    import etcd_cluster  # not before OMP_NUM_THREADS is set

    if not etcd_cluster.INSTALLED:
        pytest.skip(etcd_cluster.MISSING)
    cluster = etcd_cluster.Cluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture
def etcd(_etcd):
    """An etcd of three members, which a test may kill or stop: the next one gets it whole."""
    yield _etcd
    _etcd.until_whole()
