"""How much main memory this process may still take: the machine's figure, or what its control groups leave if less.

A container's limit is that of a control group (cgroup), its own or one above it; /proc/meminfo knows only the machine.
Whoever takes more than the group leaves is killed, without a word. Files are read when asked: a limit may change.

    /proc/self/cgroup     which groups this process is in, by hierarchy: version 2 has one, version 1 one for memory
    /proc/self/mountinfo  where they are mounted, and from which group on (a container sees only its own part)
    limit, use, stat      of the group and of every one above it that can be seen

Cached files count as used, but the kernel gives them up before it kills anyone: they count as free here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

NO_LIMIT = 1 << 60
"""Version 1 says "no limit" with a number near 2**63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Files:
    """The names of a version."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]
    """Lines of memory.stat, of the group and all below it."""


V2 = _Files(
    limits=("memory.max", "memory.high"), used="memory.current",
    reclaimable=("inactive_file", "active_file", "slab_reclaimable"),
)  # fmt: skip
V1 = _Files(
    limits=("memory.limit_in_bytes",), used="memory.usage_in_bytes",
    reclaimable=("total_inactive_file", "total_active_file"),
)  # fmt: skip


def free_bytes(root: Path = Path("/")) -> int:
    """`root`: where /proc and the control groups are found."""
    return min([machine_bytes(root), *group_bytes(root)])


def machine_bytes(root: Path = Path("/")) -> int:
    """What Linux says is available; elsewhere, half of what there is."""
    available = _numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        return available * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def group_bytes(root: Path = Path("/")) -> list[int]:
    """What every control group that limits this process leaves; empty: none does."""
    out = []
    for files, folder in _groups(root):
        limit = min((found for name in files.limits if (found := _number(folder / name)) is not None), default=NO_LIMIT)
        used = _number(folder / files.used)
        if limit < NO_LIMIT and used is not None:
            stat = _numbers(folder / "memory.stat")
            reclaimable = min(used, sum(stat.get(name, 0) for name in files.reclaimable))
            out.append(max(0, limit - used + reclaimable))
    return out


def _groups(root: Path) -> Iterator[tuple[_Files, Path]]:
    """The control groups of this process that account for memory, from its own upwards."""
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
                if not folder.is_dir():  # a path of another namespace: what can be seen is our own
                    folder, below = root / mounted.lstrip("/"), PurePosixPath()
                yield files, folder
                yield from ((files, above) for above in list(folder.parents)[: len(below.parts)])


def _mounts(root: Path) -> Iterator[tuple[_Files, str, str]]:
    """(version, the group that is at its top, where it is mounted)."""
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
    except OSError:  # no Linux, or none of this version
        return []


def _number(path: Path) -> int | None:
    """None: there is no such file, or it says "max"."""
    said = "".join(_lines(path)).strip()
    return int(said) if said.isdigit() else None


def _numbers(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
