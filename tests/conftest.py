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
