"""How the supervisor judges the processes that it started: frozen, missing, or failing too often. No I/O.

Time is counted in checks, one per CHECK_S, and not read from a clock: while the supervisor itself is suspended it
cannot observe anything, and a wall clock may be set. A process is frozen if one of these is true for FROZEN_S:

- it is a controller, and has not written a new snapshot;
- it is stopped (SIGSTOP, a debugger) and its CPU time does not change. Until a process has connected or has written a
  snapshot, it shows no other sign of life, and its start may rightly take minutes: only the kernel can tell frozen from
  slow. A process that is only slowed down, by SIGSTOP and SIGCONT in turn, uses CPU time between two checks.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from windfall.backoff import delay_s
from windfall.errors import WindfallError, describe_exit

K = TypeVar("K", int, str)
CHECK_S = 1.0
"""Seconds between two checks."""
FROZEN_S = 30.0
"""Seconds after which a process counts as frozen. It is killed and restarted."""
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


class Unchanged(Generic[K]):
    """For how long the state of each of several things has been the same."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._seen: dict[K, tuple[Any, float]] = {}
        """The state of each, and the seconds for which it has not changed."""

    def update(self, states: Mapping[K, Any]) -> list[K]:
        """One check. Returns the things whose state has not changed for the limit.

        >>> frozen = Unchanged(2 * CHECK_S)
        >>> [frozen.update({"a": 1, "b": n}) for n in range(3)]
        [[], [], ['a']]
        """
        before = self._seen
        self._seen = {
            key: (state, before[key][1] + CHECK_S if key in before and before[key][0] == state else 0.0)
            for key, state in states.items()
        }
        return [key for key, (_, unchanged_s) in self._seen.items() if unchanged_s >= self._limit_s]

    def changed_lately(self, key: K | None) -> bool:
        return key in self._seen and self._seen[key][1] < SILENT_S


def pulse(pid: int | None, snapshot: dict[str, Any] | None) -> dict[int, Any]:
    """The controller's process with the time of the last snapshot (fleet.json) that it wrote. Empty if none runs; one
    that has not written a snapshot yet is still starting."""
    if pid is None or snapshot is None or snapshot.get("pid") != pid or snapshot["ended"]:
        return {}
    return {pid: snapshot["t"]}


def missing_workers(running: set[str], snapshot: dict[str, Any] | None) -> dict[str, None]:
    """Worker processes that run but are not in the fleet. Without a version workers cannot join yet, and without a live
    controller (`snapshot` is None) the fleet is unknown."""
    if snapshot is None or snapshot["version"] is None:
        return {}
    in_fleet = {w["worker"].partition("#")[0] for w in snapshot["workers"] if w["state"] != "gone"}
    return dict.fromkeys(running - in_fleet)


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
        repeats = f" ({self.count} times in a row, with no new step in between)" if self.count > 1 else ""
        return WindfallError(error.what + repeats, where=error.where, fix=error.fix)


def failures() -> Repetition:
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
