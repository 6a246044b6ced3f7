"""A worker's connection to its agent, whatever else the script has open."""

from __future__ import annotations

import os
import resource
import socket

import pytest

from regrow import wire
from regrow.ids import Generation
from regrow.run.link import Link


@pytest.fixture
def many_open_files():
    """As of a script that has opened a thousand pieces of its data before ``regrow.init()``."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] != resource.RLIM_INFINITY and limits[1] < 2048:
        pytest.skip("no descriptor above 1023 may be had here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_worker_with_many_open_files_hears_its_agent(tmp_path, many_open_files):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        link = Link(str(tmp_path / "agent.sock"), {"type": "hello"})
        assert link._sock.fileno() > 1023
        agent, _ = listener.accept()
        with agent:
            link.watch(Generation(0), dead_after_s=5.0)  # it would end this process if it took the agent for gone
            assert wire.recv_frame(agent).head["type"] == "hello"
            assert wire.recv_frame(agent).head["type"] == "heartbeat"
            agent.sendall(wire.encode({"type": "world", "generation": 1}))
            assert link.wait_for(lambda world: world.generation == 1, timeout_s=30.0)
            link.close()
            link._watcher.join(30.0)
            assert not link._watcher.is_alive()
