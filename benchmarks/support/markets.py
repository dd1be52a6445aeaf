"""Spot markets for simulations: traces of machines that come and go. Pure.

machines   every machine comes and goes independently (providers/trace.py, `synthetic`)
poisson    machines arrive at `arrivals_per_h`, independent of departures, and stay `mean_up_s` on average
bursts     like machines, but `bursts_per_h` times an hour, the share `burst_share` of them is preempted at once
diurnal    like machines, but availability varies over a day of `day_s`: at the best hour stays are twice as long,
           at the worst hour they are close to zero
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

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
