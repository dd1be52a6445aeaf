"""The requests that simulated lenders serve, read from a file instead of generated (request_load.py).

A file has one request per line: its time in seconds or as a date, the tokens of its prompt, and the tokens of its
answer (the columns of the Azure LLM inference traces). Its requests are dealt to the lenders in turn, and repeat.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.support.request_load import SimRequest
from windfall.errors import WindfallError


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    times: Sequence[float]
    """When the requests arrive, in order, from 0 on (seconds)."""
    requests: Sequence[SimRequest]
    lenders: int
    speed: float = 1.0
    """The requests arrive this many times as fast as they did."""

    def arrivals(self, lender: int, begin_s: float, end_s: float) -> list[SimRequest]:
        """
        >>> load = RecordedLoad([0.0, 1.0, 2.0, 4.0], [SimRequest(n, n) for n in range(4)], lenders=2)
        >>> [r.prompt for r in load.arrivals(0, 0.0, 3.0)], [r.prompt for r in load.arrivals(1, 0.5, 4.5)]
        ([0, 2], [1, 3])
        """
        out, length_s = [], self.times[-1] + 1.0
        at_s, end_s = begin_s * self.speed, end_s * self.speed
        while at_s < end_s:
            lap = math.floor(at_s / length_s)
            until_s = min(end_s, (lap + 1) * length_s)
            first, last = (bisect_left(self.times, s - lap * length_s) for s in (at_s, until_s))
            out += [self.requests[n] for n in range(first, last) if n % self.lenders == lender % self.lenders]
            at_s = until_s
        return out


def read(path: Path, *, lenders: int, per_s: float) -> RecordedLoad:
    """The requests of a file, at `per_s` requests per second of one lender on average; 0: as fast as in the file."""
    fix = "Give a CSV file with the columns time, prompt tokens and generated tokens."
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if len(row) >= 3 and row[1].strip().isdecimal()]
        times = [_seconds(row[0]) for row in rows]
        requests = [SimRequest(int(row[1]), max(1, int(row[2]))) for row in rows]
    except OSError as e:
        raise WindfallError(f"cannot read the requests: {e.strerror}", where=str(path), fix="Check the path.") from e
    except (ValueError, csv.Error) as e:
        raise WindfallError(f"not a list of requests: {e}", where=str(path), fix=fix) from e
    if len(rows) < 2 or not all(map(math.isfinite, times)) or times != sorted(times):
        raise WindfallError("not a list of at least two requests in order of time", where=str(path), fix=fix)
    times = [t - times[0] for t in times]
    speed = per_s * lenders * (times[-1] + 1.0) / len(rows) if per_s else 1.0
    return RecordedLoad(times, requests, lenders, speed)


def _seconds(text: str) -> float:
    """
    >>> _seconds("12.5"), round(_seconds("2023-11-16 18:15:50.9951690") - _seconds("2023-11-16 18:15:46"), 3)
    (12.5, 4.995)
    """
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()[:26]).timestamp()
