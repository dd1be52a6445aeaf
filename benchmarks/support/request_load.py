"""The requests that simulated lenders (sim_lenders.py) serve, generated at random. Pure.

A generated load has Poisson arrivals whose rate changes every PERIOD_S, by a log-normal factor with mean 1, so that one
period in a thousand has `peak` times the mean rate. Lengths of prompts and answers are log-normal. Everything follows
from the seed and the name of the lender.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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
