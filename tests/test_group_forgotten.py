"""Operations that gloo has forgotten: whoever waits for one is woken when its generation is over."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from regrow.errors import PeerLost
from regrow.group.healing import live
from regrow.group.network import Network


@pytest.fixture
def alone():
    """A group of two of which the other one never does anything, and closes no connection either."""
    store, groups = dist.HashStore(), {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=3))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return groups


@pytest.mark.parametrize(
    "name, begin",
    [
        ("allreduce", lambda group: group.allreduce([torch.ones(2)])),
        ("_reduce_scatter_base", lambda group: group._reduce_scatter_base(torch.zeros(1), torch.ones(2))),
        ("recv", lambda group: group.recv([torch.zeros(1)], 1, 0)),
    ],
)
def test_the_end_of_the_generation_ends_the_wait(alone, name, begin):
    # this network knows nothing of the connections: its end does not reach gloo, as if gloo had forgotten
    network = Network(generation=3, store=dist.HashStore(), host_addr="127.0.0.1", user_timeout_s=5.0)
    handle = live(name, begin(alone[0]), network)
    threading.Timer(0.2, network.end).start()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="generation 3 ended before"):
        handle.wait()
    assert time.monotonic() - began < 2.0
