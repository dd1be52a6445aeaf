"""Service times of simulated engines and trainers as plain formulas, and the lengths of responses. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import xxhash


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """Service times of one machine. A decode step takes `fixed_s` (reading the weights), plus `each_s` per response in
    the batch, plus `context_s` per token of their contexts (reading the KV cache). Prefill takes `prefill_s` per token.
    Training takes `train_s` per token. An optimizer update takes `update_s`, including the publication of the weights.

    >>> h = Service(fixed_s=0.02, each_s=0.0001, prefill_s=0.00001, train_s=0.0002)
    >>> round(h.step_s(100, 1000), 3), h.training_s(5000)
    (0.04, 1.0)
    """

    fixed_s: float
    each_s: float
    context_s: float = 0.0
    prefill_s: float = 0.0
    train_s: float = 0.0
    update_s: float = 0.0
    """Seconds of an optimizer update, including the copy of the weights that workers pull."""
    over_batch: float = 0.0
    over_s: float = 0.0
    """Extra seconds for each response above `over_batch` in a step, for engines that slow down there. 0: none."""
    TIMES: ClassVar = ("fixed_s", "each_s", "context_s", "prefill_s", "train_s", "update_s", "over_s")

    def __post_init__(self) -> None:
        assert self.fixed_s > 0, "fixed_s must be above 0"

    def step_s(self, batch: float, prefill_tokens: float = 0, context: float = 0) -> float:
        decode_s = self.fixed_s + self.each_s * batch + self.context_s * context if batch else 0.0
        if self.over_s and batch > self.over_batch:
            decode_s += self.over_s * (batch - self.over_batch)
        return decode_s + self.prefill_s * prefill_tokens

    def steps_s(self, count: float, batch: float, context: float) -> float:
        """Seconds for `count` consecutive steps of one batch. Every step adds a token to each context.

        >>> s = Service(fixed_s=1.0, each_s=0.1, context_s=0.01)
        >>> round(s.steps_s(3, 2, 100), 9) == round(sum(s.step_s(2, 0, 100 + 2 * n) for n in range(3)), 9)
        True
        """
        return count * self.step_s(batch, 0, context) + self.context_s * batch * count * (count - 1) / 2

    def steps_in(self, seconds: float, batch: float, context: float) -> float:
        """Number of consecutive steps that fit into `seconds`. The inverse of `steps_s`."""
        a, b = self.context_s * batch / 2, self.step_s(batch, 0, context)
        if seconds <= 0 or not batch:
            return 0.0
        return seconds / b if a == 0 else (math.sqrt((b - a) ** 2 + 4 * a * seconds) - (b - a)) / (2 * a)

    def slower(self, factor: float) -> Service:
        """The same machine with every time multiplied by `factor`.

        >>> s = Service(fixed_s=1.0, each_s=0.5, over_batch=8, over_s=2.0).slower(2)
        >>> s.fixed_s, s.each_s, s.over_batch, s.over_s
        (2.0, 1.0, 8, 4.0)
        """
        return replace(self, **{name: getattr(self, name) * factor for name in self.TIMES})

    def training_s(self, tokens: float) -> float:
        return self.train_s * tokens


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
