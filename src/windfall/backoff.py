"""The delay before a retry: it grows by a constant factor with every failure, up to a limit. A process that has lived
long enough is restarted immediately."""

from __future__ import annotations

import math
from dataclasses import dataclass


def delay_s(failures: int, *, first_s: float, factor: float = 2.0, limit_s: float = math.inf) -> float:
    """Seconds to wait after `failures` earlier failures in a row. The first retry (0 earlier failures) waits `first_s`.

    >>> [delay_s(n, first_s=0.5, limit_s=3.0) for n in (0, 1, 2, 3, 10_000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    try:
        return min(limit_s, first_s * factor**failures)
    except OverflowError:
        return limit_s


@dataclass(kw_only=True, slots=True)
class RestartDelay:
    """The delay before the next start of a worker.

    >>> delay = RestartDelay()
    >>> [delay.after_death(lived_s=s) for s in (1.0, 1.0, 60.0, 1.0)]
    [0.2, 0.4, 0.0, 0.2]
    """

    first_s: float = 0.2
    limit_s: float = 10.0
    young_s: float = 10.0
    """A worker that dies before this age (seconds) increases the delay."""
    deaths: int = 0
    """Number of such deaths in a row."""

    def after_death(self, *, lived_s: float) -> float:
        if lived_s >= self.young_s:
            self.deaths = 0
            return 0.0
        self.deaths += 1
        return delay_s(self.deaths - 1, first_s=self.first_s, limit_s=self.limit_s)
