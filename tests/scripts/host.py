"""Lets a host be lost from within, and a job go on for as long as a test is at work."""

import os
import signal
import time
from pathlib import Path

import psutil


def lose_host() -> None:
    """Kill the agent of this host; its workers, this one included, die with it."""
    agent = next(each for each in psutil.Process().parents() if "regrow" in each.cmdline() and "run" in each.cmdline())
    agent.kill()
    signal.pause()


def linger(step: int, last: int) -> None:
    """Train slowly until the file is there that a test has named, and do not end before."""
    done = os.environ.get("REGROW_TEST_UNTIL")
    if done is None or Path(done).exists():
        return
    (Path(done).parent / f"step{step}").touch()
    time.sleep(0.02)
    deadline = time.monotonic() + 60.0
    while step == last and not Path(done).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
