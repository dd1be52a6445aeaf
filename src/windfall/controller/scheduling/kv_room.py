"""How full a worker's KV cache becomes: how many more responses may begin there, and which ones should move before the
engine has to evict one. Pure.

A response keeps its tokens in the cache until it ends, and adds one in every step. How long it will be is known only as
a distribution (lengths.py), so what is predicted is the expected number of tokens after each of the next steps:

    usage(t) = sum over responses of (context + t) * probability that it has not ended after t more tokens

`more_responses`: responses for which there will be no room stay in the queue, from where they can go anywhere, instead
of waiting in the worker's engine or being evicted there. `relieve`: the queue is empty and a worker is nearly full; an
evicted response would be prefilled again at the same worker, later. So those move for which a token of the cache costs
least, while another worker has room for them until they end:

    cost of a move         = prefill of its context
    room that it leaves    = its context and the tokens that are still to come
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from windfall.controller.scheduling.balance import Move, Running

NEARLY_FULL = 0.9
"""Share of its KV cache from which a worker is relieved."""
SAFE = 0.9
"""Share of a KV cache that the expected usage may fill. With 1.0 and 1.2 there were 1.7 to 1.8 times as many evictions,
and rollouts took as long or longer (benchmarks/papers/seer_table.py, Qwen2-VL-72B, a quarter of the machines)."""
MAX_MOVES_EACH = 8
"""Responses of one worker that are looked at in a round."""
POINTS = 24
"""Number of future moments that are looked at, evenly spread over the logarithm of time."""
UPPER = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530, 0.0)
"""Coefficients of the normal distribution's upper tail (Abramowitz and Stegun, 26.2.17)."""


class KvRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A response in a KV cache."""

    context: int
    """Tokens that it has in the cache."""
    generated: int
    limit: int
    """Upper limit for `generated`."""
    mean: float
    sigma: float
    """Mean and standard deviation of the logarithm of its length."""


class KvLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The KV cache of a worker."""

    worker: str
    tokens: int
    """Tokens for which it has room."""
    context: int
    """Tokens in the cache. While it is not nearly full, a prompt that siblings share may count more than once."""
    free_slots: int
    prefill_s: float
    """Seconds to prefill one token."""
    step_s: float
    """Seconds of an engine step."""


def usage(rows: Sequence[KvRow], times: np.ndarray) -> np.ndarray:
    """Expected tokens in the KV cache after each of `times` more tokens.

    One of these responses ends soon, after about e**5 = 148 tokens; the other has no end in sight:

    >>> short = KvRow(context=200, generated=100, limit=10_000, mean=5.0, sigma=0.1)
    >>> long = KvRow(context=200, generated=100, limit=10_000, mean=9.0, sigma=0.1)
    >>> [round(x) for x in usage([short, long], np.array([0, 1000]))]
    [400, 1200]
    """
    if not rows:
        return np.zeros(len(times))
    context, generated, limit, mean, sigma = np.array(
        [(r.context, r.generated, r.limit, r.mean, r.sigma) for r in rows]
    ).T[:, :, None]
    z = (np.log(np.maximum(1.0, generated + times)) - mean) / sigma
    z_now = (np.log(np.maximum(1.0, generated)) - mean) / sigma
    alive = np.exp(_log_upper(z) - _log_upper(z_now))
    return ((context + times) * np.where(generated + times > limit, 0.0, alive)).sum(axis=0)


def _log_upper(z: np.ndarray) -> np.ndarray:
    """Logarithm of the probability that a standard normal is above z.

    >>> np.round(_log_upper(np.array([-1.0, 0.0, 2.0])), 4).tolist()
    [-0.1728, -0.6931, -3.7832]
    """
    tail = np.polyval(UPPER, 1 / (1 + 0.2316419 * np.abs(z)))
    above = np.log(tail / math.sqrt(2 * math.pi)) - z * z / 2
    return np.where(z >= 0, above, np.log1p(-np.exp(np.minimum(above, -1e-12))))


def moments(most: float) -> np.ndarray:
    """The numbers of tokens after which usage is looked at, up to `most`."""
    return np.concatenate([[0.0], np.geomspace(1.0, max(2.0, most), POINTS)])


def more_responses(rows: Sequence[KvRow], new: KvRow, kv_tokens: int) -> int:
    """How many responses like `new` may begin beside the running ones.

    >>> running = [KvRow(context=500, generated=500, limit=1000, mean=6.4, sigma=0.1)] * 2
    >>> new = KvRow(context=100, generated=0, limit=1000, mean=5.7, sigma=0.1)
    >>> more_responses(running, new, 2000)
    5
    """
    times = moments(new.limit)
    free, each = SAFE * kv_tokens - usage(rows, times), usage([new], times)
    return max(0, math.floor((free[each > 1.0] / each[each > 1.0]).min()))


def relieve(
    loads: Sequence[KvLoad], rows: Callable[[str], Sequence[KvRow]], held: Callable[[str], Sequence[Running]], *,
    round_trip_s: float,
) -> list[Move]:  # fmt: skip
    """Moves away from workers that are nearly full and are expected to be too full, to workers that have room until the
    end. `held` and `rows` give the responses of a worker in the same order."""
    full = {load.worker for load in loads if load.context > NEARLY_FULL * load.tokens}
    if not full or len(full) == len(loads):
        return []
    caches = [_Cache(load, list(zip(held(load.worker), rows(load.worker), strict=True))) for load in loads]
    targets = [c for c in caches if c.load.worker not in full and c.free_slots > 0]
    moves: list[Move] = []
    for source in (c for c in caches if c.load.worker in full):
        by_cost = sorted(source.running, key=lambda pair: pair[0].context / (pair[0].context + pair[0].remaining + 1))
        for pair in by_cost[:MAX_MOVES_EACH]:
            if source.peak <= source.load.tokens or not targets:
                break
            target = min(targets, key=lambda t: t.peak / t.load.tokens)
            cost_s = round_trip_s + pair[0].context * target.load.prefill_s
            if (gain_s := source.eviction_s()) <= cost_s or target.peak_with(pair) > target.load.tokens:
                continue
            names = {"source": source.load.worker, "target": target.load.worker}
            moves.append(Move(id=pair[0].id, **names, gain_s=gain_s, cost_s=cost_s))
            source.remove(pair)
            target.add(pair)
            if not target.free_slots:
                targets.remove(target)
    return moves


class _Cache:
    def __init__(self, load: KvLoad, running: list[tuple[Running, KvRow]]) -> None:
        self.load, self.running, self.free_slots = load, running, load.free_slots
        self.peak = self.peak_with()
        """Expected usage at the fullest moment."""

    def add(self, pair: tuple[Running, KvRow]) -> None:
        self.running.append(pair)
        self.free_slots -= 1
        self.peak = self.peak_with()

    def remove(self, pair: tuple[Running, KvRow]) -> None:
        self.running.remove(pair)
        self.peak = self.peak_with()

    def eviction_s(self) -> float:
        """Seconds that an eviction costs: the youngest response waits until another ends, and is prefilled again."""
        shortest = min(r.context for r, _ in self.running)
        return shortest * self.load.prefill_s + min(r.remaining for r, _ in self.running) * self.load.step_s

    def peak_with(self, *more: tuple[Running, KvRow]) -> float:
        rows = [row for _, row in (*self.running, *more)]
        return float(usage(rows, moments(max((row.limit for row in rows), default=1))).max())
