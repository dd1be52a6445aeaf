"""How the supervisor judges the processes that it started: frozen, missing, or failing too often. No I/O.

Time is counted in checks, one per CHECK_S, and not read from a clock: while the supervisor itself is suspended it
cannot observe anything, and a wall clock may be set.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from windfall.backoff import delay_s
from windfall.errors import WindfallError, describe_exit

CHECK_S = 1.0
"""Seconds between two checks."""
FROZEN_S = 30.0
"""Seconds without a new snapshot after which a controller counts as frozen. It is killed and restarted."""
MISSING_S = 15.0
"""Seconds until a worker that runs but is not in the fleet is killed: a frozen one would keep its place forever."""
SILENT_S = 3.0
"""Seconds without a new snapshot after which the fleet in the last snapshot is no longer trusted."""
REPEAT_S = 60.0
"""Seconds until the same problem of workers is reported again."""
MAX_FAILURES = 4
"""A trainer that fails this often in a row, with no new step completed in between, ends the run."""
FIRST_DELAY_S = 2.0
"""Delay before the first restart of a failed trainer; each further delay is five times as long (2, 10, 50 s)."""
MAX_KILLS = 16
"""A trainer or controller that is killed this often in a row, with no new step completed in between, ends the run: the
machine has too little memory, or something kills it on purpose. More than MAX_FAILURES, because a kill is not the fault
of the process."""
FIRST_KILL_DELAY_S = 0.1
"""Delay before the first restart of a killed process; each further delay is twice as long, up to MAX_KILL_DELAY_S."""
MAX_KILL_DELAY_S = 5.0
CRASHES = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals that end a process because of its own fault. NCCL ends a process that waits too long with SIGABRT."""


@dataclass(kw_only=True)
class ControllerPulse:
    """Whether a controller process makes progress, judged by the snapshots (fleet.json) that it writes. A controller
    that has not written one yet is still starting."""

    pid: int = 0
    unchanged_s: float | None = None
    """Seconds for which the last snapshot has not changed; None if this process has not written one."""
    _last: Any = None

    def update(self, pid: int | None, snapshot: dict[str, Any] | None) -> bool:
        """One check of the controller `pid`, with the snapshot on disk. Returns True if the controller is frozen."""
        if pid is None or snapshot is None or snapshot.get("pid") != pid or snapshot["ended"]:
            self.pid = 0
            self.unchanged_s = None
            self._last = None
        elif self.pid != pid or snapshot["t"] != self._last:
            self.pid = pid
            self.unchanged_s = 0.0
            self._last = snapshot["t"]
        else:
            self.unchanged_s = (self.unchanged_s or 0.0) + CHECK_S
        return self.unchanged_s is not None and self.unchanged_s >= FROZEN_S

    @property
    def alive(self) -> bool:
        return self.unchanged_s is not None and self.unchanged_s < SILENT_S


@dataclass(kw_only=True)
class MissingWorkers:
    """Worker processes that run but are not in the fleet."""

    _missing_s: dict[str, float] = field(default_factory=dict)

    def update(self, running: set[str], snapshot: dict[str, Any] | None) -> list[str]:
        """One check. Returns the workers that are missing for too long. `snapshot`: None without a live controller."""
        # Without a version workers cannot join yet, and without a live controller the fleet is unknown.
        if snapshot is None or snapshot["version"] is None:
            self._missing_s.clear()
            return []
        in_fleet = {w["worker"].partition("#")[0] for w in snapshot["workers"] if w["state"] != "gone"}
        self._missing_s = {name: self._missing_s.get(name, 0.0) + CHECK_S for name in running - in_fleet}
        return [name for name, s in self._missing_s.items() if s > MISSING_S]


@dataclass(kw_only=True)
class StoppedProcesses:
    """Processes that were stopped (SIGSTOP, a debugger). Until a process has connected or has written a snapshot, it
    shows no other sign of life, and its start may rightly take minutes: only the kernel can tell frozen from slow."""

    _stopped: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By pid: the CPU time of the process, and the seconds for which it has been stopped."""

    def update(self, stopped: Mapping[int, int]) -> list[int]:
        """One check. `stopped`: the CPU time (clock ticks) of each process that is stopped now, by pid. Returns those
        that have been stopped for FROZEN_S. A process that is only slowed down, by SIGSTOP and SIGCONT in turn, uses
        CPU time between two checks."""
        before = self._stopped
        self._stopped = {
            pid: (ticks, before[pid][1] + CHECK_S if pid in before and before[pid][0] == ticks else 0.0)
            for pid, ticks in stopped.items()
        }
        return [pid for pid, (_, s) in self._stopped.items() if s >= FROZEN_S]


@dataclass(kw_only=True)
class Repetition:
    """When to restart a process that fails or is killed. The cause may pass, such as a lack of memory, so the process
    is restarted after a delay; restarts do not cure what comes back every time."""

    limit: int
    first_delay_s: float
    factor: float
    max_delay_s: float = math.inf
    count: int = 0
    """Failures in a row."""
    _newest_step: int = 0

    def restart_delay_s(self, newest_step: int) -> float | None:
        """Record a failure; returns the seconds until the restart, or None if the run should end. `newest_step`: the
        newest step ever completed. A step repeated from an older checkpoint is no progress.

        >>> f = failures()
        >>> [f.restart_delay_s(step) for step in (0, 0, 3, 3, 2, 3)]
        [2.0, 10.0, 2.0, 10.0, 50.0, None]
        """
        self.count = 1 if newest_step > self._newest_step else self.count + 1
        self._newest_step = max(newest_step, self._newest_step)
        if self.count >= self.limit:
            return None
        return delay_s(self.count - 1, first_s=self.first_delay_s, factor=self.factor, limit_s=self.max_delay_s)

    def final_error(self, error: WindfallError) -> WindfallError:
        """The last error with the number of failures, to end the run with."""
        repeats = f" ({self.count} times in a row, with no new step in between)" if self.count > 1 else ""
        return WindfallError(error.what + repeats, where=error.where, fix=error.fix)


def failures() -> Repetition:
    """For a trainer that fails."""
    return Repetition(limit=MAX_FAILURES, first_delay_s=FIRST_DELAY_S, factor=5.0)


def kills() -> Repetition:
    """For a process that is killed.

    >>> k = kills()
    >>> [k.restart_delay_s(0) for _ in range(8)]
    [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    """
    return Repetition(limit=MAX_KILLS, first_delay_s=FIRST_KILL_DELAY_S, factor=2.0, max_delay_s=MAX_KILL_DELAY_S)


@dataclass(kw_only=True)
class WorkerProblems:
    """Reports each kind of problem once, and again after REPEAT_S with the number of occurrences."""

    _reported: dict[str, tuple[float, int]] = field(default_factory=dict)
    """For each cause: when it was last reported (seconds), and how often it occurred after that."""

    def describe(self, name: str, fields: dict[str, Any], now_s: float) -> str | None:
        """The line to show for this event of a provider, or None if there is nothing to report."""
        worker = fields.get("worker", "?")
        match name:
            case "refused":
                cause = "was refused"
            case "spawn_failed":
                cause = f"could not be started: {fields['error']}"
            case "stuck":
                cause = "does not end"
            case "exited" if fields["by"] == "itself" and fields["code"]:
                cause = describe_exit(fields["code"])
            case _:
                return None
        reported_s, more = self._reported.get(cause, (-REPEAT_S, 0))
        if now_s - reported_s < REPEAT_S:
            self._reported[cause] = (reported_s, more + 1)
            return None
        self._reported[cause] = (now_s, 0)
        repeats = f" (and {more} more before it)" if more else ""
        return f"worker {worker} {cause}{repeats}; see {fields.get('log') or f'workers/{worker}.log'}"
