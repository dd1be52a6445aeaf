"""How long things take, as plain formulas: what a simulated engine or trainer sleeps for instead of computing. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """One machine. A decode step takes `fixed_s` (reading the weights) and `each_s` for every response in it; a token
    of a prompt, or one computed again after a move, `prefill_s`; a trained token `train_s`.

    >>> h = Service(fixed_s=0.02, each_s=0.0001, prefill_s=0.00001, train_s=0.0002)
    >>> round(h.step_s(100, 1000), 3), h.training_s(5000)
    (0.04, 1.0)
    """

    fixed_s: float
    each_s: float
    prefill_s: float = 0.0
    train_s: float = 0.0

    def step_s(self, batch: int, prefill_tokens: int = 0) -> float:
        return (self.fixed_s + self.each_s * batch if batch else 0.0) + self.prefill_s * prefill_tokens

    def slower(self, factor: float) -> Service:
        return Service(
            fixed_s=self.fixed_s * factor, each_s=self.each_s * factor, prefill_s=self.prefill_s * factor,
            train_s=self.train_s * factor,
        )  # fmt: skip

    def training_s(self, tokens: int) -> float:
        return self.train_s * tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Log-normal response lengths, a function of the response's seed and its group alone: the same wherever it is made.
    `alike` is the correlation of the logarithms within a group.

    >>> lengths = Lengths(median=100, sigma=0.7, alike=1.0)
    >>> lengths.of(1, group=7) == lengths.of(2, group=7) != lengths.of(1, group=8)
    True
    """

    median: float
    sigma: float
    alike: float = 0.0
    least: int = 2

    def of(self, seed: int, group: int = 0) -> int:
        normal = math.sqrt(self.alike) * _normal(f"g{group}") + math.sqrt(1 - self.alike) * _normal(str(seed))
        return max(self.least, round(self.median * math.exp(self.sigma * normal)))


def _normal(name: str) -> float:
    a, b = (xxhash.xxh3_64_intdigest(f"{name}/{n}".encode()) / 2.0**64 for n in "ab")
    return math.sqrt(-2 * math.log(max(a, 1e-300))) * math.cos(2 * math.pi * b)


def token(seed: int, position: int, vocabulary: int, stop: frozenset[int]) -> int:
    """Which token stands there: any, but the same every time, and none that ends a response."""
    at = xxhash.xxh3_64_intdigest(f"{seed}:{position}".encode())
    while (chosen := at % vocabulary) in stop:
        at += 1
    return chosen
