"""Limits for the processes that the environment and the agents of a job start: all descendants of its controller.

A job beyond its limits is ended with all these processes; the other jobs go on. The kernel is told to choose these
processes first when the machine runs out of memory. This is no sandbox: docs/environments.md says what is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from windfall.jobs.settings import JobLimits
from windfall.processes import process, reaper

OOM_SCORE = 500
"""Added to the score by which the kernel chooses a process to kill; 1000 makes it the first."""
KILL_S = 5.0
"""Seconds for which a tree of processes is killed again and again: it may grow meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    processes: int = 0
    bytes: int = 0


def usage(controllers: Iterable[int]) -> dict[int, Usage]:
    """What the descendants of each controller use now. Memory that they share with others does not count."""
    return {controller: _usage(pids) for controller, pids in reaper.descendants_of_all(controllers).items()}


def _usage(pids: list[int]) -> Usage:
    page, total = os.sysconf("SC_PAGE_SIZE"), 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            fields = Path(f"/proc/{pid}/statm").read_text().split()
            total += max(0, int(fields[1]) - int(fields[2])) * page
            score = Path(f"/proc/{pid}/oom_score_adj")
            if int(score.read_text()) < OOM_SCORE:
                score.write_text(str(OOM_SCORE))
    return Usage(processes=len(pids), bytes=total)


def most_bytes(limits: JobLimits, jobs_at_once: int) -> int:
    if limits.memory_gb:
        return int(limits.memory_gb * 1e9)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jobs_at_once


def exceeded(used: Usage, limits: JobLimits, most: int) -> str:
    """Why the job must end, or "".

    >>> exceeded(Usage(processes=300), JobLimits(), 1 << 30)
    'its environment has 300 processes, more than limits.processes = 256 of the fleet'
    """
    if used.processes > limits.processes:
        return (
            f"its environment has {used.processes} processes, more than limits.processes = {limits.processes} of the "
            "fleet"
        )
    if used.bytes > most:
        return (
            f"its environment uses {used.bytes / 1e9:.1f} GB of memory, more than the {most / 1e9:.1f} GB of "
            "limits.memory_gb of the fleet"
        )
    return ""


def kill_tree(controller: int) -> None:
    """Kill all descendants of a controller, which is stopped and may be killed then. They are stopped first: a process
    that is started while its parent and the reapers above it are being killed belongs to no tree any more. Takes up to
    KILL_S."""
    deadline, stopped = time.monotonic() + KILL_S, set[int]()
    while time.monotonic() < deadline and (new := {controller, *reaper.descendants(controller)} - stopped):
        for pid in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGSTOP)
        stopped |= new
    while time.monotonic() < deadline and any(not _has_ended(pid) for pid in reaper.kill_descendants(controller)):
        time.sleep(0.01)


def _has_ended(pid: int) -> bool:
    """Also if its parent, which may be stopped, has not waited for it yet."""
    try:
        return process.state(pid)[0] == "Z"
    except OSError:
        return True
