"""How much memory this process can still allocate, on a GPU or in main memory.

For main memory it is the available memory of the machine, or what the process's control groups (cgroups) allow if that
is less: /proc/meminfo describes only the machine, and the kernel kills a process that allocates more than its group, or
an ancestor of the group, allows. All files are read on every call, because a limit may change. Cached files count as
used, but the kernel reclaims them before it kills a process: here they count as free.

A container sees its own group as the root of /sys/fs/cgroup, whatever path /proc/self/cgroup has for it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_LIMIT = 1 << 60
"""Version 1 of cgroups writes a number near 2**63 for "no limit"."""
VERSIONS = (
    ("memory.current", ("memory.max", "memory.high"), ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory.usage_in_bytes", ("memory.limit_in_bytes",), ("total_inactive_file", "total_active_file")),
)
"""For version 2 and 1 of cgroups: the files with the bytes used and the limits of a group, and the lines of memory.stat
with reclaimable memory of the group and its descendants."""


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
    for folder, (usage, limits, reclaimable) in itertools.product(_groups(root), VERSIONS):
        limit = min((n for name in limits if (n := _number(folder / name)) is not None), default=NO_LIMIT)
        used = _number(folder / usage)
        if limit < NO_LIMIT and used is not None:
            stat = _numbers(folder / "memory.stat")
            out.append(max(0, limit - used + min(used, sum(stat.get(name, 0) for name in reclaimable))))
    return out


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the memory control groups of this process: its own group, then the ancestors that it can see."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = top / path.lstrip("/")
        folder = own if ".." not in own.parts and own.is_dir() else top
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


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
