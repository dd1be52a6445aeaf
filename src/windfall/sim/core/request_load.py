"""The requests that simulated lenders serve: generated at random, or read from a file. Pure except for that.

A generated load has Poisson arrivals whose rate changes every PERIOD_S, by a log-normal factor with mean 1, so that one
period in a thousand has `peak` times the mean rate. Lengths of prompts and answers are log-normal. Everything follows
from the seed and the name of the lender.

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
from typing import NamedTuple, Protocol

from windfall.errors import WindfallError
from windfall.sim.core.draws import standard_normal, uniform

PERIOD_S = 30.0


class SimRequest(NamedTuple):
    prompt: int
    generated: int


class RequestLoad(Protocol):
    def arrivals(self, lender: int, begin_s: float, end_s: float) -> list[SimRequest]:
        """The requests that a lender, given by its number, gets in this time."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratedLoad:
    """
    >>> load = GeneratedLoad(seed=1, per_s=2.0, prompt_tokens=500, generated_tokens=100, peak=4.0)
    >>> counts = [len(load.arrivals(0, s, s + 1.0)) for s in range(3000)]
    >>> 1.8 < sum(counts) / 3000 < 2.2, load.arrivals(0, 5.0, 6.0) == load.arrivals(0, 5.0, 6.0)
    (True, True)
    """

    seed: int
    per_s: float
    """Mean requests per second of one lender."""
    prompt_tokens: float
    """Median tokens of a prompt."""
    generated_tokens: float
    """Median tokens of an answer."""
    sigma: float = 0.8
    """Standard deviation of the logarithm of both."""
    peak: float = 1.0

    def arrivals(self, lender: int, begin_s: float, end_s: float) -> list[SimRequest]:
        name = f"{self.seed}/lender {lender}"
        spread = 3.0 - math.sqrt(9.0 - 2.0 * math.log(self.peak))  # exp(3 s - s^2 / 2) is the peak
        factor = math.exp(spread * standard_normal(f"{name}/{begin_s // PERIOD_S}") - spread * spread / 2)
        count = _poisson(self.per_s * factor * (end_s - begin_s), f"{name}/count/{begin_s}")
        return [
            SimRequest(
                self._length(self.prompt_tokens, f"{name}/{begin_s}/{n}/p"),
                self._length(self.generated_tokens, f"{name}/{begin_s}/{n}/g"),
            )
            for n in range(count)
        ]

    def _length(self, median: float, name: str) -> int:
        return max(1, round(median * math.exp(self.sigma * standard_normal(name))))


def _poisson(expected: float, name: str) -> int:
    """
    >>> draws = [_poisson(2000.0, str(n)) for n in range(200)]
    >>> 1980 < sum(draws) / 200 < 2020, max(draws) < 2300, _poisson(0.0, "")
    (True, True, 0)
    """
    if expected > 500:  # about normal; exp(-expected) would soon be 0
        return max(0, round(expected + math.sqrt(expected) * standard_normal(name)))
    drawn, count, chance = uniform(name), 0, math.exp(-expected)
    total = chance
    while drawn > total and (count < expected or chance > 1e-18):
        count += 1
        chance *= expected / count
        total += chance
    return count


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
