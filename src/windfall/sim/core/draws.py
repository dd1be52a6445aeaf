"""Random numbers that depend only on a name, and the lengths of responses drawn with them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class LogNormalLengths:
    """Log-normal response lengths. A length depends only on the response's seed and group, so it is the same on every
    worker. `alike` is the correlation of the logarithms within a group.

    >>> lengths = LogNormalLengths(median=100, sigma=0.7, alike=1.0)
    >>> lengths.draw(1, group=7) == lengths.draw(2, group=7) != lengths.draw(1, group=8)
    True
    """

    median: float
    sigma: float
    alike: float = 0.0
    least: int = 2

    def draw(self, seed: int, group: int = 0) -> int:
        normal = _correlated_normal(seed, group, self.alike)
        return max(self.least, round(self.median * math.exp(self.sigma * normal)))


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLengths:
    """Response lengths drawn from a list of measured ones, by the response's seed and group.

    >>> MeasuredLengths(lengths=(10, 20, 30)).draw(1) in (10, 20, 30)
    True
    """

    lengths: Sequence[int]
    """Measured lengths, sorted."""
    alike: float = 0.0

    def draw(self, seed: int, group: int = 0) -> int:
        normal = _correlated_normal(seed, group, self.alike)
        share = (1 + math.erf(normal / math.sqrt(2))) / 2
        return max(1, self.lengths[min(len(self.lengths) - 1, int(share * len(self.lengths)))])


def _correlated_normal(seed: int, group: int, alike: float) -> float:
    return math.sqrt(alike) * standard_normal(f"g{group}") + math.sqrt(1 - alike) * standard_normal(str(seed))


@lru_cache(maxsize=1 << 14)
def standard_normal(name: str) -> float:
    """A standard normal sample for this name. Cached, because all siblings use the sample of their group."""
    a, b = uniform(f"{name}/a"), uniform(f"{name}/b")
    return math.sqrt(-2 * math.log(max(a, 1e-300))) * math.cos(2 * math.pi * b)


def uniform(name: str) -> float:
    """A number from 0 to 1 that depends only on the name. It is the same in every process."""
    return xxhash.xxh3_64_intdigest(name.encode()) / 2.0**64
