"""What the supervisor concludes from what it sees: who stands still, who is missing, what is worth a word. No I/O.

Time is counted in looks, not read from a clock: while the supervisor itself stands still nobody can be seen, and a wall
clock may be set.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import Any

from windfall.backoff import delay_s
from windfall.errors import WindfallError

LOOK_S = 1.0
FROZEN_S = 30.0
"""A controller that gives no sign of life for so long is killed, and so started again."""
MISSING_S = 15.0
"""So is a worker of ours that runs and is not in the fleet for so long: frozen, it would hold its place for ever."""
SILENT_S = 3.0
"""A controller that is silent for so long knows nothing of who is there."""
AGAIN_S = 60.0
"""The same trouble is worth another word after so long."""
FAILURES = 4
"""A trainer that fails this often in a row, with no new step completed in between, ends the run."""
FIRST_WAIT_S = 2.0
"""Wait before the first restart of a failed trainer; each further wait is five times as long (2, 10, 50 s)."""


@dataclass(kw_only=True)
class Pulse:
    """Of one controller process, by the snapshots that it writes. One that has written none yet is still starting."""

    pid: int = 0
    still_s: float | None = None
    """How long the last snapshot has stayed the same; None: there is none of this process."""
    _last: Any = None

    def look(self, pid: int | None, said: dict[str, Any] | None) -> bool:
        """`pid`: of the controller that runs now, if any does; `said`: the snapshot on disk. True: it is frozen."""
        if pid is None or said is None or said.get("pid") != pid or said["ended"]:
            self.pid, self.still_s, self._last = 0, None, None
        elif self.pid != pid or said["t"] != self._last:
            self.pid, self.still_s, self._last = pid, 0.0, said["t"]
        else:
            self.still_s = (self.still_s or 0.0) + LOOK_S
        return self.still_s is not None and self.still_s >= FROZEN_S

    @property
    def beats(self) -> bool:
        return self.still_s is not None and self.still_s < SILENT_S


@dataclass(kw_only=True)
class Absent:
    """Workers that run and are not in the fleet."""

    _missing_s: dict[str, float] = field(default_factory=dict)

    def look(self, running: set[str], said: dict[str, Any] | None) -> list[str]:
        """Who has been missing for too long. `said`: the fleet as a controller that lives says it is, else None."""
        if said is None or said["version"] is None:  # nobody to join yet, or nobody who would know
            self._missing_s.clear()
            return []
        here = {w["worker"].partition("#")[0] for w in said["workers"] if w["state"] != "gone"}
        self._missing_s = {name: self._missing_s.get(name, 0.0) + LOOK_S for name in running - here}
        return [name for name, s in self._missing_s.items() if s > MISSING_S]


@dataclass(kw_only=True)
class Failures:
    """Of the trainer. Memory may be free again later, so it is started again after a while; a failure that comes back
    every time is not cured by that."""

    count: int = 0
    """In a row."""
    _reached: int = 0

    def again_s(self, reached: int) -> float | None:
        """It has failed: how long to wait before it is started again; None: not at all. `reached`: the newest step that
        was ever completed. A step that is repeated, because the checkpoint is older, is no progress.

        >>> f = Failures()
        >>> [f.again_s(step) for step in (0, 0, 3, 3, 2, 3)]
        [2.0, 10.0, 2.0, 10.0, 50.0, None]
        """
        self.count = 1 if reached > self._reached else self.count + 1
        self._reached = max(reached, self._reached)
        return delay_s(self.count - 1, first_s=FIRST_WAIT_S, factor=5.0) if self.count < FAILURES else None

    def last(self, error: WindfallError) -> WindfallError:
        """The one that ends the run."""
        often = f" ({self.count} times in a row, and no new step in between)" if self.count > 1 else ""
        return WindfallError(error.what + often, where=error.where, fix=error.fix)


@dataclass(kw_only=True)
class WorkerTroubles:
    """Of workers: each cause is told once, and again after a while with how often it has come."""

    _told: dict[str, tuple[float, int]] = field(default_factory=dict)

    def hear(self, name: str, fields: dict[str, Any], now_s: float) -> str | None:
        """An event of a provider: what to say of it, if anything."""
        worker = fields.get("worker", "?")
        match name:
            case "refused":
                cause = "was refused"
            case "spawn_failed":
                cause = f"could not be started: {fields['error']}"
            case "stuck":
                cause = "does not end"
            case "exited" if fields["by"] == "itself" and fields["code"]:
                cause = how(fields["code"])
            case _:
                return None
        told_s, more = self._told.get(cause, (-AGAIN_S, 0))
        if now_s - told_s < AGAIN_S:
            self._told[cause] = (told_s, more + 1)
            return None
        self._told[cause] = (now_s, 0)
        again = f" (and {more} more like it before)" if more else ""
        return f"worker {worker} {cause}{again}; see workers/{worker}.log"


def how(code: int) -> str:
    """How a process ended.

    >>> how(1), how(-9), how(-99)
    ('ended with status 1', 'was killed (SIGKILL)', 'was killed (signal 99)')
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed (signal {-code})"
