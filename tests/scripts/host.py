"""Lets a host be lost from within."""

import signal

import psutil


def lose_host() -> None:
    """Kill the agent of this host; its workers, this one included, die with it."""
    agent = next(each for each in psutil.Process().parents() if "regrow" in each.cmdline() and "run" in each.cmdline())
    agent.kill()
    signal.pause()
