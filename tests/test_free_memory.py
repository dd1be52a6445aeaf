"""Free memory respects the limits of a container: control groups simulated in a folder, and a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windfall import free_memory
from windfall.free_memory import free_bytes, group_bytes

GIB = 1 << 30


class Machine:
    """A root folder with /proc and control groups."""

    def __init__(self, root: Path, *, available: int = 64 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def is_in(self, *lines: str) -> None:
        self.write("proc/self/cgroup", "\n".join(lines))

    def v2(
        self, path: str, *, limit: str | int = "max", high: str | int = "max", used: int = 0, stat: str = ""
    ) -> None:
        """Files of one group."""
        for name, content in {"max": limit, "high": high, "current": used, "stat": stat}.items():
            self.write(f"sys/fs/cgroup/{path}/memory.{name}", content)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_the_machine_counts(machine: Machine) -> None:
    assert free_bytes(root=machine.root) == 64 * GIB
    machine.is_in("0::/user.slice")
    machine.v2("user.slice", used=3 * GIB)
    assert free_bytes(root=machine.root) == 64 * GIB


def test_container_with_its_own_namespace(machine: Machine) -> None:
    machine.is_in("0::/")
    machine.v2(".", limit=8 * GIB, used=3 * GIB)
    assert free_bytes(root=machine.root) == 5 * GIB
    machine.v2(".", limit=8 * GIB, high=6 * GIB, used=3 * GIB)
    assert free_bytes(root=machine.root) == 3 * GIB, "above memory.high the kernel would throttle the process"


def test_cached_files_count_as_free(machine: Machine) -> None:
    machine.is_in("0::/")
    stat = f"anon {GIB}\nfile {4 * GIB}\nshmem {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n"
    machine.v2(".", limit=8 * GIB, used=6 * GIB, stat=stat + f"slab_reclaimable {GIB // 2}")
    assert free_bytes(root=machine.root) == 2 * GIB + 3 * GIB + GIB // 2, "memory files (shmem) are not cache"


def test_an_ancestor_group_may_be_tighter(machine: Machine) -> None:
    machine.is_in("0::/kubepods/pod7/main")
    machine.v2("kubepods/pod7/main", limit=32 * GIB, used=GIB)
    machine.v2("kubepods/pod7", limit=4 * GIB, used=3 * GIB)
    machine.v2("kubepods")
    assert free_bytes(root=machine.root) == GIB


def test_host_path_that_the_container_cannot_see(machine: Machine) -> None:
    machine.is_in("0::/../../docker/abc")
    machine.v2(".", limit=2 * GIB, used=GIB)
    assert free_bytes(root=machine.root) == GIB
    machine.is_in("0::/docker/abc")
    assert free_bytes(root=machine.root) == GIB


@pytest.mark.parametrize("root", ["/", "/docker/abc"])
def test_cgroup_version_1(machine: Machine, root: str) -> None:
    machine.is_in("4:memory:/docker/abc", "3:cpu,cpuacct:/docker/abc", "0::/docker/abc")
    folder = "sys/fs/cgroup/memory" + ("/docker/abc" if root == "/" else "")
    if root == "/":
        machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
        machine.write("sys/fs/cgroup/memory/memory.usage_in_bytes", 20 * GIB)
    machine.write(f"{folder}/memory.limit_in_bytes", 6 * GIB)
    machine.write(f"{folder}/memory.usage_in_bytes", 5 * GIB)
    machine.write(f"{folder}/memory.stat", f"cache {3 * GIB}\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}")
    assert group_bytes(machine.root) == [3 * GIB]
    assert free_bytes(root=machine.root) == 3 * GIB


def test_usage_above_the_limit_leaves_nothing(machine: Machine) -> None:
    """A limit may be lowered below what is used."""
    machine.is_in("0::/")
    machine.v2(".", limit=2 * GIB, used=3 * GIB)
    assert free_bytes(root=machine.root) == 0


def test_unreadable_files_are_ignored(machine: Machine) -> None:
    machine.is_in("0::/", "garbage", "4:memory")
    machine.write("sys/fs/cgroup/memory.max", "what?")
    assert free_bytes(root=machine.root) == 64 * GIB


def own_group() -> Path | None:
    """The version 1 group of this process, if a child group can be created in it."""
    found = [folder for folder in free_memory._groups(Path("/")) if (folder / "memory.limit_in_bytes").exists()]
    return found[0] if found and os.access(found[0], os.W_OK) else None


@pytest.mark.slow
@pytest.mark.skipif(own_group() is None, reason="no control group in which a test could create another one")
def test_real_control_group() -> None:
    above = own_group()
    assert above is not None
    group = above / f"windfall-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(512 << 20))
    except OSError as e:
        pytest.skip(f"no control group can be created: {e}")
    code = (
        f"open('{group}/cgroup.procs', 'w').write('0')\n"
        "from windfall.free_memory import free_bytes\n"
        "before = free_bytes()\nkept = bytearray(b'x') * (200 << 20)\nprint(before, before - free_bytes())"
    )
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    finally:
        group.rmdir()
    before, taken = map(int, done.stdout.split())
    assert 256 << 20 < before <= 512 << 20
    assert abs(taken - (200 << 20)) < 16 << 20
