"""How much memory this process can still allocate, on a GPU or in main memory.

For main memory it is the available memory of the machine, or what the process's control groups (cgroups) allow if that
is less. A container is limited by its control group or by one of the group's ancestors; /proc/meminfo describes only
the machine. The kernel kills a process that allocates more than its group allows. All files are read on every call,
because a limit may change.

    /proc/self/cgroup     the groups of this process, by hierarchy: version 2 has one, version 1 has one for memory
    /proc/self/mountinfo  where the groups are mounted, and which group is the root (a container sees only its own part)
    limit, usage, stat    of the group and of every visible ancestor

Cached files count as used, but the kernel reclaims them before it kills a process: here they count as free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

NO_LIMIT = 1 << 60
"""Version 1 writes a number near 2**63 for "no limit"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """File names of a cgroup version."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]
    """Lines of memory.stat with reclaimable memory of the group and its descendants."""


V2 = _Files(
    limits=("memory.max", "memory.high"),
    used="memory.current",
    reclaimable=("inactive_file", "active_file", "slab_reclaimable"),
)
V1 = _Files(
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    reclaimable=("total_inactive_file", "total_active_file"),
)


def free_bytes(device: Any = "cpu", root: Path = Path("/")) -> int:
    """Bytes that this process can still allocate on a device ("cpu", "cuda" or a torch.device). On a GPU: the driver's
    free memory, plus what torch's allocator has reserved and does not use. `root`: the folder of /proc and /sys."""
    if str(device).startswith("cuda"):
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return min([machine_bytes(root), *group_bytes(root)])


def machine_bytes(root: Path = Path("/")) -> int:
    """The available memory on Linux; on other systems, half of the physical memory."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def group_bytes(root: Path = Path("/")) -> list[int]:
    """Free bytes of every control group that limits this process; empty if there is no limit."""
    out = []
    for files, folder in _groups(root):
        limit = min((n for name in files.limits if (n := _number(folder / name)) is not None), default=NO_LIMIT)
        used = _number(folder / files.used)
        if limit < NO_LIMIT and used is not None:
            stat = _numbers(folder / "memory.stat")
            reclaimable = min(used, sum(stat.get(name, 0) for name in files.reclaimable))
            out.append(max(0, limit - used + reclaimable))
    return out


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """The memory control groups of this process: its own group, then the ancestors."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not (number == "0" and not controllers) and "memory" not in controllers.split(","):
            continue
        files = V1 if controllers else V2
        for kind, top, mounted in mounts:
            if kind is files:
                own = PurePosixPath(path)
                below = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
                folder = root / mounted.lstrip("/") / below
                if not folder.is_dir():  # the path belongs to another namespace: the mounted folder is our own group
                    folder, below = root / mounted.lstrip("/"), PurePosixPath()
                yield files, folder
                yield from ((files, above) for above in list(folder.parents)[: len(below.parts)])


def _mounts(root: Path) -> Iterator[tuple[_Files, str, str]]:
    """(version, group at the root of the mount, folder where it is mounted)."""
    for line in _lines(root / "proc/self/mountinfo"):
        # 34 33 0:31 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield V2, fields[3], fields[4]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield V1, fields[3], fields[4]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux, or not this cgroup version
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file or its content is "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file whose lines have the form "name number", by name."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
