"""How much memory is left for snapshots: what a kernel tells, written down as it does, and what this one tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regrow.peer.room import room

MB = 1 << 20
V1_MOUNT = "34 31 0:32 {root} {at} rw,relatime shared:9 - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {root} {at} rw,relatime - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
)


class Kernel:
    """Files as a kernel shows them: one process, its control groups, and a host with plenty of memory."""

    def __init__(self, directory: Path, mounts: str, belongs: str) -> None:
        self.process = directory / "proc"
        self.groups = directory / "groups"
        self.meminfo = directory / "meminfo"
        self.process.mkdir()
        self.groups.mkdir()
        self.meminfo.write_text("MemTotal:       99 kB\nMemAvailable:   1099511627776 kB\n")
        (self.process / "mountinfo").write_text(OTHER_MOUNTS + mounts)
        (self.process / "cgroup").write_text(belongs)

    def group(self, path: str, names: tuple[str, str, str], limit: object, used: int, cached: int) -> None:
        place = self.groups / path
        place.mkdir(parents=True, exist_ok=True)
        (place / names[0]).write_text(f"{limit}\n")
        (place / names[1]).write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"cache 5\n{names[2]} {cached}\n")

    def room(self, directory: Path):
        return room(directory, self.process, self.meminfo)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


@pytest.fixture
def v2(tmp_path):
    return Kernel(tmp_path, V2_MOUNT.format(root="/", at=tmp_path / "groups"), "0::/pods/mine\n")


def test_the_limit_of_a_container(tmp_path, v2):
    v2.group("pods/mine", V2, 900, 500, 100)
    v2.group("pods", V2, "max", 5000, 0)
    found = v2.room(tmp_path)
    assert found.bytes == 500  # what is cached makes room
    assert f"{v2.groups}/pods/mine/memory.max allows" in found.limit


def test_a_limit_above_the_own_group_counts_for_all_below(tmp_path, v2):
    v2.group("pods/mine", V2, 900 * MB, 100 * MB, 0)
    v2.group("pods", V2, 1000 * MB, 700 * MB, 0)
    found = v2.room(tmp_path)
    assert found.bytes == 300 * MB
    assert found.limit.endswith("/pods/memory.max allows 1000 MB, 700 MB of it used")
    v2.group("", V2, 10 * MB, 20 * MB, 0)
    assert v2.room(tmp_path).bytes == 0


def test_the_first_version(tmp_path):
    """No limit is a very large number there; both versions may be mounted, and only one has the memory."""
    mounts = V1_MOUNT.format(root="/", at=tmp_path / "groups") + V2_MOUNT.format(root="/", at=tmp_path / "none")
    kernel = Kernel(tmp_path, mounts, "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n")
    kernel.group("a/b", V1, 9223372036854771712, 10, 0)
    kernel.group("a", V1, 700, 200, 50)
    kernel.group("", V1, 9223372036854771712, 10, 0)
    assert kernel.room(tmp_path).bytes == 550


def test_a_container_that_sees_only_its_own_part(tmp_path):
    mounts = V1_MOUNT.format(root="/docker/abc", at=tmp_path / "groups")
    kernel = Kernel(tmp_path, mounts, "4:memory:/docker/abc\n")
    kernel.group("", V1, 700, 200, 0)
    assert kernel.room(tmp_path).bytes == 500
    kernel = Kernel(*_elsewhere(tmp_path, mounts))  # moved out of what it sees
    kernel.group("", V1, 800, 200, 0)
    assert kernel.room(tmp_path).bytes == 600


def _elsewhere(tmp_path: Path, mounts: str) -> tuple[Path, str, str]:
    other = tmp_path / "other"
    other.mkdir()
    return other, mounts.replace(f"{tmp_path}/groups", f"{other}/groups"), "4:memory:/docker/xyz\n"


def test_without_control_groups_the_host_and_its_shared_memory_count(tmp_path, v2):
    for name in ("cgroup", "mountinfo"):
        (v2.process / name).unlink()
    stat = os.statvfs(tmp_path)
    found = v2.room(tmp_path)
    assert found.bytes == pytest.approx(stat.f_bavail * stat.f_frsize, rel=0.2) and "of it free" in found.limit
    v2.meminfo.write_text("MemAvailable:   3 kB\n")
    assert v2.room(tmp_path).bytes == 3072 and v2.room(tmp_path).limit == "the host's available memory"


def test_this_host():
    found = room(Path("/dev/shm"))
    stat = os.statvfs("/dev/shm")
    assert 0 < found.bytes <= stat.f_blocks * stat.f_frsize
