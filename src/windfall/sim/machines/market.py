"""Spot markets: traces of machines that come and go, and prices that change over time. Pure except for the price file.

    machines   every machine comes and goes independently (fleet.trace.synthetic)
    poisson    machines arrive at `arrivals_per_h`, independent of departures, and stay `mean_up_s` on average
    bursts     like machines, but `bursts_per_h` times an hour, the share `burst_share` of them is preempted at once
    diurnal    like machines, but availability varies over a day of `day_s`: at the best hour stays are twice as long,
               at the worst hour they are close to zero

To add a market, write a generator here, add it to `generate`, and name it in `sim.market` (recipe/sections.py).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from windfall.errors import WindfallError
from windfall.providers import trace
from windfall.providers.trace_formats import Change


@dataclass(frozen=True, kw_only=True, slots=True)
class MarketRates:
    nodes: int
    mean_up_s: float
    mean_down_s: float
    arrivals_per_h: float = 0.0
    bursts_per_h: float = 0.0
    burst_share: float = 0.5
    day_s: float = 86400.0


def generate(kind: str, rates: MarketRates, *, seconds: float, seed: int) -> list[Change]:
    """Generate a trace of one of the kinds above. The same seed gives the same trace."""
    if kind == "machines":
        means = {"mean_up_s": rates.mean_up_s, "mean_down_s": rates.mean_down_s}
        return trace.synthetic(nodes=rates.nodes, seconds=seconds, seed=seed, **means)
    market = {"poisson": _poisson, "bursts": _bursts, "diurnal": _diurnal}[kind]
    return sorted(market(rates, seconds, seed), key=lambda c: c.at_s)


def _poisson(rates: MarketRates, seconds: float, seed: int) -> list[Change]:
    draw, changes = random.Random(f"poisson/{seed}"), list[Change]()
    at_s, number = 0.0, 0
    while at_s < seconds and rates.arrivals_per_h > 0:
        number += 1
        changes.append(Change(at_s=at_s, node=f"n{number}", up=True))
        changes.append(Change(at_s=at_s + draw.expovariate(1 / rates.mean_up_s), node=f"n{number}", up=False))
        at_s += draw.expovariate(rates.arrivals_per_h / 3600)
    return trace.slots(sorted((c for c in changes if c.at_s < seconds), key=lambda c: c.at_s), rates.nodes)


def _bursts(rates: MarketRates, seconds: float, seed: int) -> Iterator[Change]:
    """After a burst, a machine stays away as long as after any other preemption."""
    draw, moments, at_s = random.Random(f"bursts/{seed}"), list[float](), 0.0
    while rates.bursts_per_h > 0 and (at_s := at_s + draw.expovariate(rates.bursts_per_h / 3600)) < seconds:
        moments.append(at_s)
    for k in range(rates.nodes):
        own = random.Random(f"{seed}/{k}")
        at_s, up = 0.0, k == 0 or own.random() < rates.mean_up_s / (rates.mean_up_s + rates.mean_down_s)
        if not up:
            at_s, up = own.expovariate(1 / rates.mean_down_s), True
        while at_s < seconds:
            yield Change(at_s=at_s, node=f"n{k + 1}", up=up)
            stay_s = own.expovariate(1 / (rates.mean_up_s if up else rates.mean_down_s))
            between = moments[bisect_right(moments, at_s) : bisect_left(moments, at_s + stay_s)]
            hit = next((b for b in between if own.random() < rates.burst_share), None)
            at_s = hit if up and hit is not None else at_s + stay_s
            up = not up


def _diurnal(rates: MarketRates, seconds: float, seed: int) -> Iterator[Change]:
    draw = random.Random(f"diurnal/{seed}")
    for k in range(rates.nodes):
        at_s, up = 0.0, True
        while at_s < seconds:
            yield Change(at_s=at_s, node=f"n{k + 1}", up=up)
            good = 1 + math.cos(2 * math.pi * at_s / rates.day_s)  # best at the start
            mean_s = rates.mean_up_s * max(0.05, good) if up else rates.mean_down_s * max(0.05, 2 - good)
            at_s += draw.expovariate(1 / mean_s)
            up = not up


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """A price per hour as a step function of time, which starts at 0 s.

    >>> p = Prices(from_s=(0.0, 3600.0), usd_per_h=(2.0, 4.0))
    >>> p.at(1800), p.at(3600), p.between(1800, 5400)
    (2.0, 4.0, 3.0)
    """

    from_s: Sequence[float]
    usd_per_h: Sequence[float]

    def at(self, now_s: float) -> float:
        return self.usd_per_h[max(0, bisect_right(self.from_s, now_s) - 1)]

    def between(self, start_s: float, end_s: float) -> float:
        """Dollars for one machine from `start_s` to `end_s`."""
        edges = [start_s, *(s for s in self.from_s if start_s < s < end_s), end_s]
        return sum(self.at(a) * (b - a) for a, b in pairwise(edges)) / 3600


def constant(usd_per_h: float) -> Prices:
    return Prices(from_s=(0.0,), usd_per_h=(usd_per_h,))


def prices(path: Path) -> Prices:
    """Read prices from a file with lines `seconds,usd_per_h`, in order of time; the first is for 0 s."""
    fix = "Write lines 'seconds,usd_per_h', in order of time; the first is for 0 s."
    rows: list[tuple[float, float]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as e:
        raise WindfallError(f"cannot read the prices: {e.strerror}", where=str(path), fix="Check the path.") from e
    for n, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            at_s, usd = map(float, line.split(","))
            in_order = at_s > rows[-1][0] if rows else at_s == 0
            if not (in_order and math.isfinite(usd) and usd > 0):
                raise ValueError
        except ValueError:
            raise WindfallError(f"{line[:80]!r} is not a price", where=f"{path}, line {n}", fix=fix) from None
        rows.append((at_s, usd))
    if not rows:
        raise WindfallError("no prices in the file", where=str(path), fix=fix)
    return Prices(from_s=tuple(r[0] for r in rows), usd_per_h=tuple(r[1] for r in rows))
