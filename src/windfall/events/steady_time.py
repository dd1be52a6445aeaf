"""The times of events, although the wall clock of their machine may be set at any time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

JUMP_S = 5.0
"""If the two clocks of events differ by more than this about the time between two events, one of them was set."""
MAX_GAP_S = 300.0
"""A monotonic clock that goes back, or forward by more than this, is that of another start of a machine."""


@dataclass(slots=True)
class SteadyTime:
    """The times of a log's events without the jumps of a wall clock that was set.

    The clock is set back by an hour between the second event and the third:

    >>> time = SteadyTime()
    >>> [time.at(t, m) for t, m in ((5000.0, 10.0), (5002.0, 12.0), (1404.0, 14.0), (1405.0, 15.0))]
    [5000.0, 5002.0, 5004.0, 5005.0]
    """

    shift_s: float = 0.0
    """What to add to a wall time of now."""
    _clocks: tuple[float, float] | None = None
    """Wall time and monotonic time of the last event, in seconds."""

    def at(self, t: float, m: float) -> float:
        """The time of the next event, which has these clocks. If they disagree about the time since the last event, the
        wall clock was set, or this machine slept, and the monotonic clock is right. After a restart of the machine only
        the wall clock can say how long that took."""
        if self._clocks is not None:
            by_wall, by_monotonic = t - self._clocks[0], m - self._clocks[1]
            if abs(by_wall - by_monotonic) > JUMP_S:
                known = 0 <= by_monotonic <= MAX_GAP_S
                self.shift_s += (by_monotonic if known else max(0.0, by_wall)) - by_wall
        self._clocks = (t, m)
        return t + self.shift_s
