"""How much memory can still be had for snapshots: what is free, what a container is allowed, what fits /dev/shm.

Only reads what the kernel tells. A limit of a control group counts for all below it, so every one from this process's
own up to the root is looked at. Its use counts without files that lie in memory only for speed: these make room.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class Room:
    """So many bytes, and what limits them, in words."""

    bytes: int
    limit: str


@dataclass(frozen=True)
class _Kind:
    """Where one version of control groups says what."""

    limit: str
    used: str
    cached: str
    """In ``memory.stat``: files that the kernel would give up first."""


_V1 = _Kind("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Kind("memory.max", "memory.current", "inactive_file")


def room(directory: Path, process: Path = Path("/proc/self"), host: Path = Path("/proc/meminfo")) -> Room:
    """Return how much fits into a directory in shared memory; the tightest of all limits counts."""
    stat = os.statvfs(directory)
    free = stat.f_bavail * stat.f_frsize
    fields = dict(line.split(":") for line in host.read_text().splitlines())
    found = [
        Room(free, f"{_mount_of(directory)} has {_mib(stat.f_blocks * stat.f_frsize)}, {_mib(free)} of it free"),
        Room(int(fields["MemAvailable"].split()[0]) << 10, "the host's available memory"),
    ]
    for group, kind in groups(process):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such limit there, or none at all ("max")
            limit = int((group / kind.limit).read_text())
            used = int((group / kind.used).read_text())
            facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = max(0, used - int(facts[kind.cached]))
            found.append(
                Room(max(0, limit - used), f"{group / kind.limit} allows {_mib(limit)}, {_mib(used)} of it used")
            )
    return min(found)


def groups(process: Path) -> Iterator[tuple[Path, _Kind]]:
    """Give the control groups that limit this process's memory, as directories, its own first."""
    try:
        belongs = [line.split(":", 2) for line in (process / "cgroup").read_text().splitlines()]
        mounts = [line.split(" - ") for line in (process / "mountinfo").read_text().splitlines()]
    except OSError:
        return
    for own, kind, of_filesystem in (
        (next((path for _, names, path in belongs if "memory" in names.split(",")), None), _V1, "cgroup"),
        (next((path for number, names, path in belongs if number == "0" and not names), None), _V2, "cgroup2"),
    ):
        for place, filesystem in mounts if own is not None else ():
            words, (name, _, options) = place.split(), filesystem.split(" ", 2)
            if name != of_filesystem or (kind is _V1 and "memory" not in options.split(",")):
                continue
            assert own is not None
            root, mounted = Path(words[3]), Path(words[4])
            # where only a part of the tree is shown, what lies outside of it cannot be read
            inner = Path(own).relative_to(root) if Path(own).is_relative_to(root) else Path()
            yield from ((mounted / step, kind) for step in (inner, *inner.parents))


def _mount_of(directory: Path) -> Path:
    at = directory.absolute()
    while not at.is_mount() and at != at.parent:
        at = at.parent
    return at


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MB"
