"""Lifelines: a killed process is heard of before it is gone; one that ends in order, or forks, is not."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from regrow import lifeline

WAIT_S = 20.0
HOLDER = """
import os, sys, time
from pathlib import Path
from regrow import lifeline
path = lifeline.hold(Path(sys.argv[1]))
memory = bytearray(os.urandom(1 << 20)) * 300  # takes a while to be freed
if sys.argv[2] == "fork" and os.fork() == 0:
    sys.exit()  # its end is not the holder's
if sys.argv[2] == "fork":
    os.wait()
print(path, flush=True)
sys.stdin.read()
if sys.argv[2] == "status":
    os._exit(3)
"""


@pytest.fixture
def start(tmp_path):
    started = []

    def starter(how: str = "") -> tuple[subprocess.Popen, queue.Queue]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path), how]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        path = Path(process.stdout.readline().strip())
        heard: queue.Queue = queue.Queue()
        lifeline.Observer(path, lambda: heard.put((time.monotonic(), lifeline.dying_by(process.pid))))
        assert not path.exists()  # nobody else is to find it
        return process, heard

    yield starter
    for process in started:
        process.kill()
        process.wait(WAIT_S)
        process.stdin.close()
        process.stdout.close()


def gone(process: subprocess.Popen) -> float:
    """When the process had been taken down."""
    descriptor = os.pidfd_open(process.pid)
    try:
        assert select.select([descriptor], [], [], WAIT_S)[0]
        return time.monotonic()
    finally:
        os.close(descriptor)


def test_a_death_is_heard_of_with_its_signal_before_the_process_is_gone(start):
    process, heard = start()
    process.send_signal(signal.SIGKILL)
    gone_at = gone(process)
    heard_at, by = heard.get(timeout=WAIT_S)
    assert heard_at < gone_at
    assert by == signal.SIGKILL


def test_another_signal_is_told_apart(start):
    process, heard = start()
    process.send_signal(signal.SIGTERM)
    assert heard.get(timeout=WAIT_S)[1] in (signal.SIGTERM, None)  # None: it was quicker than the look at it


def test_an_end_in_good_order_is_no_death(start):
    process, heard = start()
    process.stdin.close()
    assert process.wait(WAIT_S) == 0
    with pytest.raises(queue.Empty):
        heard.get(timeout=1.5)


def test_an_exit_status_is_no_signal(start):
    process, heard = start("status")
    process.stdin.close()
    assert process.wait(WAIT_S) == 3
    assert heard.get(timeout=WAIT_S)[1] is None


def test_the_end_of_a_forked_child_is_no_death(start):
    process, heard = start("fork")
    with pytest.raises(queue.Empty):
        heard.get(timeout=0.5)
    process.send_signal(signal.SIGKILL)
    assert heard.get(timeout=WAIT_S)[1] in (signal.SIGKILL, None)


def test_only_the_main_thread_ends_with_its_process(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(lifeline.hold(tmp_path)))
    thread.start()
    thread.join()
    assert found == [None]


def test_a_directory_that_is_not_there(tmp_path):
    assert lifeline.hold(tmp_path / "missing") is None
