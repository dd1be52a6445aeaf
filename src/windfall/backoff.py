"""The delay before a retry: it grows by a constant factor with every failure, up to a limit."""

from __future__ import annotations

import math


def delay_s(failures: int, *, first_s: float, factor: float = 2.0, limit_s: float = math.inf) -> float:
    """Seconds to wait after `failures` earlier failures in a row. The first retry (0 earlier failures) waits `first_s`.

    >>> [delay_s(n, first_s=0.5, limit_s=3.0) for n in (0, 1, 2, 3, 10_000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    try:
        return min(limit_s, first_s * factor**failures)
    except OverflowError:
        return limit_s
