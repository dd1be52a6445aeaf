"""Phase 1: how many GPUs of each kind train, and how many replicas of which size generate. Pure.

    steps per second   1 / max(train, tokens / H + update, tail)      staleness above 0: training overlaps
                       1 / (the longer of training and g = max(tokens / H, tail), plus the part of the shorter one
                       that pipelining does not hide, + update)       staleness 0
    H                  sum of the replicas' tokens per second

The rate never falls with H, so for every trainer only the Pareto frontier of H and price matters: no solution is faster
for less money. It is built kind by kind: the best use of n GPUs of a kind is a knapsack table, and the frontiers of two
kinds are merged by adding every point of one to every point of the other. All objectives choose from this frontier.

It is exact as long as it is small. A kind with more than DENSE GPUs is tried in steps of STEP, and a frontier keeps at
most POINTS points, spread over its speeds; planner.py then improves the best plans by single changes.

AReaL-Hex states rollout as x responses and y replicas per configuration, which is bilinear; with continuous x it is the
knapsack for H used here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

Objective = Literal["throughput", "cost", "deadline"]
TOLERANCE = 1e-6
DENSE, STEP = 48, 1.06
"""Up to this many GPUs of a kind, every number is tried; above it, numbers that grow by this factor."""
POINTS = 256
"""Points of a frontier that are kept."""


def key(objective: Objective, rate: Any, usd_per_h: Any) -> tuple[Any, Any]:
    """What an objective minimizes, and what decides between equal ones; of one solution, or of arrays of them."""
    match objective:
        case "throughput":
            return -rate, usd_per_h
        case "cost":
            return usd_per_h / rate, -rate
        case "deadline":
            return usd_per_h, -rate


class TrainOption(NamedTuple):
    kind: int
    gpus: int
    step_s: float


class ReplicaOption(NamedTuple):
    kind: int
    tp: int
    tok_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    have: tuple[int, ...]
    """GPUs of every kind."""
    usd_per_h: tuple[float, ...]
    """Price of one GPU of every kind."""
    trainers: tuple[TrainOption, ...]
    replicas: tuple[ReplicaOption, ...]
    tokens: float
    """Response tokens of a step."""
    update_s: float = 0.0
    """Seconds per step that generation loses to new weights and rewards."""
    tail_s: float = 0.0
    """Lower bound of a step, set by its longest responses."""
    overlapped: bool = True
    hidden: float = 0.0
    """If not overlapped: share of the shorter of training and generation that pipelining hides."""
    objective: Objective = "throughput"
    budget_usd_per_h: float = math.inf
    deadline_rate: float = 0.0
    """Steps per second that must be reached."""

    def rate(self, train_s: float, tok_per_s: Any) -> Any:
        """Steps per second; of one speed, or of an array of them."""
        generate_s = self.tokens / np.maximum(tok_per_s, 1e-30)
        if self.overlapped:
            return 1 / np.maximum(np.maximum(train_s, self.tail_s), generate_s + self.update_s)
        generate_s = np.maximum(generate_s, self.tail_s)
        longer, shorter = np.maximum(train_s, generate_s), np.minimum(train_s, generate_s)
        return 1 / (longer + (1 - self.hidden) * shorter + self.update_s)

    def key(self, rate: float, usd_per_h: float) -> tuple[float, ...]:
        """Smaller is better. Solutions over the budget or behind the deadline are not compared."""
        return key(self.objective, rate, usd_per_h)

    def allowed(self, rate: Any, usd_per_h: Any) -> Any:
        """Whether limits are kept; of one solution, or of arrays of them."""
        in_time = rate >= self.deadline_rate * (1 - TOLERANCE) if self.objective == "deadline" else True
        return (rate > 1e-20) & (usd_per_h <= self.budget_usd_per_h * (1 + TOLERANCE)) & in_time


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A solution: one trainer, and replicas by option."""

    trainer: TrainOption
    replicas: dict[ReplicaOption, int] = field(hash=False)
    rate: float
    usd_per_h: float

    @property
    def tok_per_s(self) -> float:
        """What the replicas could generate."""
        return sum(option.tok_per_s * count for option, count in self.replicas.items())


class _Fill(NamedTuple):
    """The best use of n GPUs of one kind."""

    tok_per_s: float
    used: int
    option: ReplicaOption | None


def knapsack(options: Sequence[ReplicaOption], gpus: int) -> list[_Fill]:
    """For every n up to `gpus`, the highest tokens per second; of equal ones, that with the fewest GPUs.

    >>> table = knapsack([ReplicaOption(0, 1, 2.0), ReplicaOption(0, 2, 5.0)], 3)
    >>> [fill.tok_per_s for fill in table]
    [0.0, 2.0, 5.0, 7.0]
    """
    table = [_Fill(0.0, 0, None)]
    for n in range(1, gpus + 1):
        best = _Fill(table[-1].tok_per_s, table[-1].used, None)
        for option in options:
            if option.tp <= n and option.tok_per_s > 0:
                before = table[n - option.tp]
                made = _Fill(before.tok_per_s + option.tok_per_s, before.used + option.tp, option)
                if made.tok_per_s > best.tok_per_s * (1 + 1e-12):
                    best = made
        table.append(best)
    return table


def _chosen(table: Sequence[_Fill], n: int) -> Iterator[ReplicaOption]:
    while n > 0:
        option = table[n].option
        if option is None:
            n -= 1
        else:
            yield option
            n -= option.tp


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


def _none(kinds: int) -> Frontier:
    return Frontier(np.zeros(1), np.zeros(1), np.zeros((1, kinds), dtype=int))


class _Tables:
    """What the GPUs of every kind can generate."""

    def __init__(self, problem: Problem) -> None:
        self.p, self.kinds = problem, range(len(problem.have))
        self.fills = [knapsack([r for r in problem.replicas if r.kind == k], problem.have[k]) for k in self.kinds]
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
            made = _none(len(self.kinds))
            for k in self.kinds:
                if k != kind:
                    made = made.plus(self.one(k, self.p.have[k]))
            self._others[kind] = made
        return self._others[kind]

    def split(self, trainer: TrainOption, gpus: np.ndarray, rate: float, usd_per_h: float) -> Split:
        replicas: dict[ReplicaOption, int] = {}
        for k in self.kinds:
            for option in _chosen(self.fills[k], int(gpus[k])):
                replicas[option] = replicas.get(option, 0) + 1
        return Split(trainer=trainer, replicas=replicas, rate=rate, usd_per_h=usd_per_h)


def solve(problem: Problem, count: int = 1, between: int = 0) -> list[Split]:
    """The best solutions, best first, each with another trainer; then `between` solutions of the frontier of speed and
    price over all trainers. Empty: nothing satisfies the limits."""
    tables = _Tables(problem)
    best: list[tuple[tuple[float, ...], Split]] = []
    rows: list[tuple[TrainOption, np.ndarray, float, float]] = []
    enough: dict[int, int] = {}
    """The smallest trainer of each kind that is never waited for: a larger one costs more and is no better."""
    for trainer in sorted(problem.trainers):
        left = problem.have[trainer.kind] - trainer.gpus
        if left < 0 or trainer.gpus > enough.get(trainer.kind, trainer.gpus):
            continue
        if problem.overlapped and trainer.step_s <= problem.tail_s:
            enough.setdefault(trainer.kind, trainer.gpus)
        made = tables.others(trainer.kind).plus(tables.one(trainer.kind, left))
        rate = problem.rate(trainer.step_s, made.tok_per_s)
        usd = made.usd_per_h + problem.usd_per_h[trainer.kind] * trainer.gpus
        ok = np.flatnonzero(problem.allowed(rate, usd) & (made.tok_per_s > 0))
        if not len(ok):
            continue
        first, then = key(problem.objective, rate[ok], usd[ok])
        n = ok[np.lexsort((then, first))[0]]
        split = tables.split(trainer, made.gpus[n], float(rate[n]), float(usd[n]))
        best.append((problem.key(split.rate, split.usd_per_h), split))
        if between:
            rows += [
                (trainer, made.gpus[i], float(rate[i]), float(usd[i])) for i in ok[_undominated(rate[ok], usd[ok])]
            ]
    out = [split for _, split in sorted(best, key=lambda row: row[0])[:count]]
    if rows:
        rates, prices = (np.array([row[i] for row in rows]) for i in (2, 3))
        out += [tables.split(*rows[n]) for n in _spread(_undominated(rates, prices), rates, between)]
    return out
