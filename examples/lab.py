"""Hosts on one machine: network namespaces with addresses of their own, on a switch that can be told to lose one.

Needs root and iproute2. All that it makes has the process's number in its name, and goes when the lab is closed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence

_CLONE_NEWNET = 0x40000000


def why_not() -> str:
    """Return why there can be no lab here; nothing if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        probe = f"regrow-probe-{os.getpid()}"
        subprocess.run(["ip", "netns", "add", probe], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "del", probe], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.decode().strip()}"
    return ""


class Lab:
    """So many hosts; the first has the address 10.77.0.1."""

    def __init__(self, hosts: int) -> None:
        self._name = f"regrow{os.getpid()}"
        self._switch = f"{self._name}-switch"
        self._made: list[str] = []
        try:
            self._add(self._switch)
            self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self._switch, "link", "set", "bridge", "up")
            for host in range(hosts):
                self._connect(host)
        except BaseException:
            self.close()
            raise

    def _add(self, space: str) -> None:
        self._ip("netns", "add", space)
        self._made.append(space)

    def _connect(self, host: int) -> None:
        space = self._space(host)
        self._add(space)
        self._ip(
            "-n", self._switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", space
        )
        self._ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge", "up")
        self._ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._ip("-n", space, "link", "set", "eth0", "up")
        self._ip("-n", space, "link", "set", "lo", "up")

    def _space(self, host: int) -> str:
        return f"{self._name}-host{host}"

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=30)

    @staticmethod
    def address(host: int) -> str:
        """Return a host's address."""
        return f"10.77.0.{host + 1}"

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs another one on a host."""
        return ["ip", "netns", "exec", self._space(host), *command]

    def enter(self, host: int) -> None:
        """Let this thread, and what it starts from now on, be on a host."""
        space = os.open(f"/run/netns/{self._space(host)}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(space, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        finally:
            os.close(space)

    def lose(self, host: int) -> None:
        """Let whatever goes to or comes from a host vanish: its cable is in, and nobody refuses anything."""
        self._ip("-n", self._switch, "link", "set", f"port{host}", "nomaster")

    def find(self, host: int) -> None:
        """Let it be reached again."""
        self._ip("-n", self._switch, "link", "set", f"port{host}", "master", "bridge")

    def limit(self, host: int, mbit_s: int) -> None:
        """Let a host send and receive no more than so many megabits a second."""
        rate = ["root", "tbf", "rate", f"{mbit_s}mbit", "burst", "128kb", "latency", "50ms"]
        ends = ((self._space(host), "eth0"), (self._switch, f"port{host}"))
        for space, device in ends:
            command = ["ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", device, *rate]
            subprocess.run(command, check=True, timeout=30)

    def close(self) -> None:
        """Remove all of it."""
        for space in reversed(self._made):
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True, timeout=30)
        self._made.clear()
