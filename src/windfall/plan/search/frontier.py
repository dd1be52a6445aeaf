"""Phase 1: how many GPUs of each kind train, and how many engines of which size generate. Pure.

    steps per second   1 / max(train, tokens / H + update, tail)      staleness above 0: training overlaps
                       1 / (the longer of training and g = max(tokens / H, tail), plus the part of the shorter one
                       that pipelining does not hide, + update)       staleness 0
    H                  sum of the engines' tokens per second

The rate never falls with H, so for every trainer only the Pareto frontier of H and price matters: no solution is faster
for less money. It is built kind by kind: the best use of n GPUs of a kind is a knapsack table, and the frontiers of two
kinds are merged by adding every point of one to every point of the other. All objectives choose from this frontier.

It is exact as long as it is small. A kind with more than DENSE GPUs is tried in steps of STEP, and a frontier keeps at
most POINTS points, spread over its speeds; planner.py then improves the best plans by single changes.

AReaL-Hex states rollout as x responses and y engines per configuration, which is bilinear; with continuous x it is the
knapsack for H used here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

Objective = Literal["throughput", "cost", "deadline"]
TOLERANCE = 1e-6
DENSE, STEP = 48, 1.06
"""Up to this many GPUs of a kind, every number is tried; above it, numbers that grow by this factor."""
POINTS = 256
"""Points of a frontier that are kept."""
PIPELINED = 0.9
"""Without staleness: share of the shorter of training and generation that pipelining hides. From simulations."""
Trainer = tuple[int, int]
"""Number of the kind, and GPUs that train."""
Engine = tuple[int, int]
"""Number of the kind, and GPUs of one engine."""


def key(objective: Objective, rate: Any, usd_per_h: Any) -> tuple[Any, Any]:
    """What an objective minimizes, and what decides between equal ones; of one solution, or of arrays of them."""
    match objective:
        case "throughput":
            return -rate, usd_per_h
        case "cost":
            return usd_per_h / rate, -rate
        case "deadline":
            return usd_per_h, -rate


def steps_per_s(train_s: float, tok_per_s: Any, tokens: float, update_s: float, tail_s: float, overlapped: bool) -> Any:
    """Steps per second; of one speed of generation, or of an array of them."""
    generate_s = tokens / np.maximum(tok_per_s, 1e-30)
    if overlapped:
        return 1 / np.maximum(np.maximum(train_s, tail_s), generate_s + update_s)
    generate_s = np.maximum(generate_s, tail_s)
    longer, shorter = np.maximum(train_s, generate_s), np.minimum(train_s, generate_s)
    return 1 / (longer + (1 - PIPELINED) * shorter + update_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    have: tuple[int, ...]
    """GPUs of every kind."""
    usd_per_h: tuple[float, ...]
    """Price of one GPU of every kind."""
    trainers: Mapping[Trainer, float]
    """Seconds of training per step."""
    engines: Mapping[Engine, float]
    """Tokens per second of one engine."""
    tokens: float
    """Response tokens of a step."""
    update_s: float = 0.0
    """Seconds per step that generation loses to new weights and rewards."""
    tail_s: float = 0.0
    """Lower bound of a step, set by its longest responses."""
    overlapped: bool = True
    objective: Objective = "throughput"
    budget_usd_per_h: float = math.inf
    deadline_rate: float = 0.0
    """Steps per second that must be reached."""

    def rate(self, train_s: float, tok_per_s: Any) -> Any:
        return steps_per_s(train_s, tok_per_s, self.tokens, self.update_s, self.tail_s, self.overlapped)

    def key(self, rate: float, usd_per_h: float) -> tuple[float, ...]:
        """Smaller is better. Solutions over the budget or behind the deadline are not compared."""
        return key(self.objective, rate, usd_per_h)

    def allowed(self, rate: Any, usd_per_h: Any) -> Any:
        """Whether limits are kept; of one solution, or of arrays of them."""
        in_time = rate >= self.deadline_rate * (1 - TOLERANCE) if self.objective == "deadline" else True
        return (rate > 1e-20) & (usd_per_h <= self.budget_usd_per_h * (1 + TOLERANCE)) & in_time


class Counts(NamedTuple):
    """What is placed: one trainer, and the number of engines of every kind and size."""

    trainer: Trainer
    engines: Mapping[Engine, int]


class Solution(NamedTuple):
    counts: Counts
    rate: float
    usd_per_h: float


class _Fill(NamedTuple):
    """The best use of n GPUs of one kind."""

    tok_per_s: float
    used: int
    engine: Engine | None


def knapsack(engines: Mapping[Engine, float], gpus: int) -> list[_Fill]:
    """For every n up to `gpus`, the highest tokens per second; of equal ones, that with the fewest GPUs.

    >>> table = knapsack({(0, 1): 2.0, (0, 2): 5.0}, 3)
    >>> [fill.tok_per_s for fill in table]
    [0.0, 2.0, 5.0, 7.0]
    """
    table = [_Fill(0.0, 0, None)]
    for n in range(1, gpus + 1):
        best = _Fill(table[-1].tok_per_s, table[-1].used, None)
        for engine, tok_per_s in engines.items():
            if engine[1] <= n and tok_per_s > 0:
                before = table[n - engine[1]]
                made = _Fill(before.tok_per_s + tok_per_s, before.used + engine[1], engine)
                if made.tok_per_s > best.tok_per_s * (1 + 1e-12):
                    best = made
        table.append(best)
    return table


def _chosen(table: list[_Fill], n: int) -> Iterator[Engine]:
    while n > 0:
        engine = table[n].engine
        if engine is None:
            n -= 1
        else:
            yield engine
            n -= engine[1]


def _numbers(most: int) -> list[int]:
    """Numbers of GPUs to try: all up to DENSE, then in growing steps, and the last one."""
    out = list(range(min(most, DENSE) + 1))
    while out[-1] < most:
        out.append(min(most, math.ceil(out[-1] * STEP)))
    return out


class Frontier(NamedTuple):
    """Speeds with their prices, none of which is both slower and dearer than another."""

    tok_per_s: np.ndarray
    usd_per_h: np.ndarray
    gpus: np.ndarray
    """A row per point: GPUs of every kind."""

    def plus(self, other: Frontier) -> Frontier:
        """Everything that both can do together."""
        speed = (self.tok_per_s[:, None] + other.tok_per_s).ravel()
        usd = (self.usd_per_h[:, None] + other.usd_per_h).ravel()
        kept = _spread(_undominated(speed, usd), speed)
        a, b = np.divmod(kept, len(other.tok_per_s))
        return Frontier(speed[kept], usd[kept], self.gpus[a] + other.gpus[b])


def _undominated(value: np.ndarray, usd: np.ndarray) -> np.ndarray:
    """Points that are better than every cheaper one, the cheapest first.

    >>> _undominated(np.array([1.0, 3.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0, 4.0])).tolist()
    [0, 1]
    """
    order = np.lexsort((-value, usd))
    before = np.concatenate(([-math.inf], np.maximum.accumulate(value[order])[:-1]))
    return order[value[order] > before * (1 + 1e-12)]


def _spread(points: np.ndarray, value: np.ndarray, most: int = POINTS) -> np.ndarray:
    """At most about this many of the points, at even distances of the logarithms of their values, and the last."""
    if len(points) <= most:
        return points
    places = np.log(np.maximum(value[points], value[points].max() * 1e-4))
    shares = (places - places[0]) / max(places[-1] - places[0], 1e-12)
    _, first = np.unique(np.floor(shares * (most - 1)).astype(int), return_index=True)
    return points[np.union1d(first, [len(points) - 1])]


class _Tables:
    """What the GPUs of every kind can generate."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.kinds = range(len(problem.have))
        self.fills = [
            knapsack({e: speed for e, speed in problem.engines.items() if e[0] == k}, problem.have[k])
            for k in self.kinds
        ]
        self._others: dict[int, Frontier] = {}

    def one(self, kind: int, most: int) -> Frontier:
        """Up to this many GPUs of one kind."""
        numbers = _numbers(most)
        fills = [self.fills[kind][n] for n in numbers]
        gpus = np.zeros((len(numbers), len(self.kinds)), dtype=int)
        gpus[:, kind] = numbers
        usd = np.array([self.p.usd_per_h[kind] * f.used for f in fills])
        return Frontier(np.array([f.tok_per_s for f in fills]), usd, gpus)

    def others(self, kind: int) -> Frontier:
        """All kinds but one."""
        if kind not in self._others:
            made = Frontier(np.zeros(1), np.zeros(1), np.zeros((1, len(self.kinds)), dtype=int))
            for k in self.kinds:
                if k != kind:
                    made = made.plus(self.one(k, self.p.have[k]))
            self._others[kind] = made
        return self._others[kind]

    def solution(self, trainer: Trainer, gpus: np.ndarray, rate: float, usd_per_h: float) -> Solution:
        engines = Counter(engine for k in self.kinds for engine in _chosen(self.fills[k], int(gpus[k])))
        return Solution(Counts(trainer, engines), rate, usd_per_h)


def solve(problem: Problem, count: int = 1, between: int = 0) -> list[Solution]:
    """The best solutions, best first, each with another trainer; then `between` solutions of the frontier of speed and
    price over all trainers. Empty: nothing satisfies the limits."""
    tables = _Tables(problem)
    best: list[Solution] = []
    rows: list[tuple[Trainer, np.ndarray, float, float]] = []
    enough: dict[int, int] = {}
    """The smallest trainer of each kind that is never waited for: a larger one costs more and is no better."""
    for kind, gpus in sorted(problem.trainers):
        train_s = problem.trainers[kind, gpus]
        left = problem.have[kind] - gpus
        if left < 0 or gpus > enough.get(kind, gpus):
            continue
        if problem.overlapped and train_s <= problem.tail_s:
            enough.setdefault(kind, gpus)
        made = tables.others(kind).plus(tables.one(kind, left))
        rate = problem.rate(train_s, made.tok_per_s)
        usd = made.usd_per_h + problem.usd_per_h[kind] * gpus
        ok = np.flatnonzero(problem.allowed(rate, usd) & (made.tok_per_s > 0))
        if not len(ok):
            continue
        first, then = key(problem.objective, rate[ok], usd[ok])
        n = ok[np.lexsort((then, first))[0]]
        best.append(tables.solution((kind, gpus), made.gpus[n], float(rate[n]), float(usd[n])))
        if between:
            points = ok[_undominated(rate[ok], usd[ok])]
            rows += [((kind, gpus), made.gpus[i], float(rate[i]), float(usd[i])) for i in points]
    out = sorted(best, key=lambda s: problem.key(s.rate, s.usd_per_h))[:count]
    if rows:
        rates, prices = (np.array([row[i] for row in rows]) for i in (2, 3))
        out += [tables.solution(*rows[n]) for n in _spread(_undominated(rates, prices), rates, between)]
    return out
