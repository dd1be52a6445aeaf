"""Phase 1: how many GPUs of each kind train, and how many engines of which size generate. Pure.

    steps per second   1 / max(train, tokens / H + update, tail)      staleness above 0: training overlaps
                       1 / (the longer of training and g = max(tokens / H, tail), plus the part of the shorter one
                       that pipelining does not hide, + update)       staleness 0
    H                  sum of the engines' tokens per second

The rate never falls with H, so for every trainer, engines are taken in the order of their tokens per dollar, or those
of one kind first, until H is what the trainer or the deadline needs, a multiple or a part of it, or until no GPU or
money is left. planner.py places the best of these counts, and improves the best plans by single changes.

AReaL-Hex states rollout as x responses and y engines per configuration, which is bilinear; with continuous x only H
counts, as here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Objective = Literal["throughput", "cost", "deadline"]
TOLERANCE = 1e-6
LEVELS = (0.25, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0, 2.4, 2.8, 3.4, 4.0, 8.0, math.inf)
"""What engines generate together, relative to what the trainer needs."""
PIPELINED = 0.9
"""Without staleness: share of the shorter of training and generation that pipelining hides. From simulations."""
Trainer = tuple[int, int]
"""Number of the kind, and GPUs that train."""
Engine = tuple[int, int]
"""Number of the kind, and GPUs of one engine."""


def key(objective: Objective, rate: float, usd_per_h: float) -> tuple[float, float]:
    """What an objective minimizes, and what decides between equal ones."""
    match objective:
        case "throughput":
            return -rate, usd_per_h
        case "cost":
            return usd_per_h / rate, -rate
        case "deadline":
            return usd_per_h, -rate


def steps_per_s(
    train_s: float, tok_per_s: float, tokens: float, update_s: float, tail_s: float, overlapped: bool
) -> float:
    generate_s = tokens / max(tok_per_s, 1e-30)
    if overlapped:
        return 1 / max(train_s, tail_s, generate_s + update_s)
    generate_s = max(generate_s, tail_s)
    longer, shorter = max(train_s, generate_s), min(train_s, generate_s)
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

    def rate(self, train_s: float, tok_per_s: float) -> float:
        return steps_per_s(train_s, tok_per_s, self.tokens, self.update_s, self.tail_s, self.overlapped)

    def key(self, rate: float, usd_per_h: float) -> tuple[float, ...]:
        """Smaller is better. Solutions over the budget or behind the deadline are not compared."""
        return key(self.objective, rate, usd_per_h)

    def allowed(self, rate: float, usd_per_h: float) -> bool:
        """Whether limits are kept."""
        in_time = self.objective != "deadline" or rate >= self.deadline_rate * (1 - TOLERANCE)
        return rate > 1e-20 and usd_per_h <= self.budget_usd_per_h * (1 + TOLERANCE) and in_time


class Counts(NamedTuple):
    """What is placed: one trainer, and the number of engines of every kind and size."""

    trainer: Trainer
    engines: Mapping[Engine, int]


class Solution(NamedTuple):
    counts: Counts
    rate: float
    usd_per_h: float


def fastest_by_price(rows: Sequence[tuple[float, float]], most: int) -> list[int]:
    """Which of these pairs of speed and dollars per hour are faster than every cheaper one, the cheapest first: at most
    this many, at even distances of the logarithms of their prices.

    >>> fastest_by_price([(10.0, 1.0), (30.0, 4.0), (20.0, 2.0), (5.0, 3.0)], 2)
    [0, 1]
    """
    out: list[int] = []
    for n in sorted(range(len(rows)), key=lambda n: (rows[n][1], -rows[n][0])):
        if not out or rows[n][0] > rows[out[-1]][0] * (1 + 1e-9):
            out.append(n)
    if len(out) <= most:
        return out
    at = [math.log(max(rows[n][1], 1e-9)) for n in out]
    wanted = [at[0] + (at[-1] - at[0]) * i / (most - 1) for i in range(most)]
    return [out[i] for i in sorted({min(range(len(at)), key=lambda n: abs(at[n] - x)) for x in wanted})]


def solve(problem: Problem, most: int) -> list[Solution]:
    """Solutions that keep the limits, best first. If there are more than this, half of them have different trainers,
    and the others are faster than every cheaper one, over all trainers."""
    found = [s for s in _solutions(problem) if problem.allowed(s.rate, s.usd_per_h)]
    found = list({(s.counts.trainer, frozenset(s.counts.engines.items())): s for s in found}.values())
    found.sort(key=lambda s: problem.key(s.rate, s.usd_per_h))
    if len(found) <= most:
        return found
    best: dict[Trainer, Solution] = {}
    for solution in found:
        best.setdefault(solution.counts.trainer, solution)
    by_price = fastest_by_price([(s.rate, s.usd_per_h) for s in found], most // 2)
    return [*list(best.values())[: most // 2], *(found[n] for n in by_price)]


def _solutions(problem: Problem) -> Iterator[Solution]:
    p = problem
    by_price = sorted(p.engines, key=lambda e: e[1] * p.usd_per_h[e[0]] / max(p.engines[e], 1e-30))
    orders = [by_price]
    for k in range(len(p.have)):
        alone, others = ([e for e in by_price if (e[0] == k) == own] for own in (True, False))
        orders += [alone, alone + others]
    for trainer, train_s in p.trainers.items():
        kind, gpus = trainer
        paid = gpus * p.usd_per_h[kind]
        free = [have - gpus * (k == kind) for k, have in enumerate(p.have)]
        bound_s = max(train_s, p.tail_s)
        needed = {level * p.tokens / max(bound_s - p.update_s, 0.1 * bound_s) for level in LEVELS}
        if p.deadline_rate:
            needed.add(p.tokens / max(1 / p.deadline_rate - p.update_s, 1e-9))
        for order in orders:
            for tok_per_s in needed:
                made = _filled(p, order, list(free), tok_per_s, p.budget_usd_per_h - paid)
                if made.engines:
                    rate = p.rate(train_s, made.tok_per_s)
                    yield Solution(Counts(trainer, made.engines), rate, paid + made.usd_per_h)


class _Filled(NamedTuple):
    engines: Mapping[Engine, int]
    tok_per_s: float
    usd_per_h: float


def _filled(p: Problem, order: Sequence[Engine], free: list[int], tok_per_s: float, usd_per_h: float) -> _Filled:
    """Engines in this order until they are this fast, or until no GPU or money is left."""
    engines: dict[Engine, int] = {}
    speed = usd = 0.0
    for engine in order:
        kind, size = engine
        price, each = size * p.usd_per_h[kind], p.engines[engine]
        if each <= 0 or speed >= tok_per_s:
            continue
        most = free[kind] // size
        if math.isfinite(tok_per_s):
            most = min(most, math.ceil((tok_per_s - speed) / each - TOLERANCE))
        if price and math.isfinite(usd_per_h):
            most = min(most, int((usd_per_h - usd) / price + TOLERANCE))
        if most > 0:
            engines[engine] = most
            free[kind] -= most * size
            speed += most * each
            usd += most * price
    return _Filled(engines, speed, usd)
