"""The solver against brute force, on random small problems."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from windfall.plan.search.frontier import Counts, Problem, knapsack, solve


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    kinds = draw.randint(1, 3)
    have = tuple(draw.randint(1, 6 - kinds) for _ in range(kinds))
    trainers = {}
    for k in range(kinds):
        work_s = draw.uniform(50, 500)
        trainers |= {(k, n): work_s / n**0.9 for n in range(1, have[k] + 1) if draw.random() < 0.8}
    engines = {(k, tp): draw.uniform(100, 2000) * tp**0.8 for k in range(kinds) for tp in (1, 2, 4) if tp <= have[k]}
    objective = draw.choice(["throughput", "cost", "deadline"])
    return Problem(
        have=have, usd_per_h=tuple(draw.uniform(0.5, 8) for _ in have), trainers=trainers, engines=engines,
        tokens=draw.uniform(1e4, 3e5), update_s=draw.choice([0.0, draw.uniform(0, 20)]),
        tail_s=draw.choice([0.0, draw.uniform(0, 100)]), overlapped=draw.random() < 0.6,
        objective=objective,  # pyright: ignore
        budget_usd_per_h=draw.choice([math.inf, draw.uniform(2, 30)]),
        deadline_rate=draw.uniform(1e-4, 2e-2) if objective == "deadline" else 0.0,
    )  # fmt: skip


def used(p: Problem, counts: Counts) -> list[int]:
    """GPUs of every kind."""
    out = [0] * len(p.have)
    for k, gpus, n in [(*counts.trainer, 1), *((k, tp, n) for (k, tp), n in counts.engines.items())]:
        out[k] += gpus * n
    return out


def brute_force(p: Problem) -> tuple[float, ...] | None:
    """Every trainer with every number of every replica."""
    best = None
    ranges = [range(p.have[k] // tp + 1) for k, tp in p.engines]
    for trainer, train_s in p.trainers.items():
        for numbers in itertools.product(*ranges):
            gpus = used(p, Counts(trainer, dict(zip(p.engines, numbers, strict=True))))
            if any(u > h for u, h in zip(gpus, p.have, strict=True)):
                continue
            usd = sum(u * price for u, price in zip(gpus, p.usd_per_h, strict=True))
            rate = p.rate(train_s, sum(speed * n for speed, n in zip(p.engines.values(), numbers, strict=True)))
            if p.allowed(rate, usd):
                key = p.key(rate, usd)
                best = key if best is None or key < best else best
    return best


def gap(p: Problem) -> float | None:
    """How much worse than the best; None: neither finds a solution."""
    best, found = brute_force(p), solve(p)
    assert bool(found) == (best is not None)
    if best is None:
        return None
    first = found[0]
    gpus = used(p, first.counts)
    assert all(u <= h for u, h in zip(gpus, p.have, strict=True))
    assert first.usd_per_h == pytest.approx(sum(u * x for u, x in zip(gpus, p.usd_per_h, strict=True)))
    assert p.allowed(first.rate, first.usd_per_h)
    return abs(p.key(first.rate, first.usd_per_h)[0] / best[0] - 1)


def test_frontier_is_exact_on_300_random_problems() -> None:
    gaps = [g for seed in range(300) if (g := gap(random_problem(seed))) is not None]
    assert len(gaps) > 150
    assert max(gaps) < 1e-9


def test_next_best_solutions_have_other_trainers_and_are_in_order() -> None:
    p = next(q for q in map(random_problem, range(100)) if len(solve(q, 3)) == 3)
    found = solve(p, 3)
    keys = [p.key(s.rate, s.usd_per_h) for s in found]
    assert keys == sorted(keys)
    assert len({s.counts.trainer for s in found}) == 3


def test_knapsack_prefers_fewer_gpus_for_equal_speed() -> None:
    table = knapsack({(0, 1): 3.0, (0, 2): 6.0}, 4)
    assert [f.tok_per_s for f in table] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert knapsack({(0, 2): 6.0}, 3)[3].used == 2


def test_nothing_to_choose_from_is_no_solution() -> None:
    assert solve(Problem(have=(1,), usd_per_h=(1.0,), trainers={}, engines={}, tokens=1.0)) == []


def test_frontier_has_no_solution_that_is_slower_and_dearer_than_another() -> None:
    for seed in range(40):
        p = replace(random_problem(seed), objective="throughput", budget_usd_per_h=math.inf)
        found = solve(p, 0, between=6)
        assert [s.usd_per_h for s in found] == sorted(s.usd_per_h for s in found)
        assert [s.rate for s in found] == sorted(s.rate for s in found)
        if best := solve(p):
            assert found[-1].rate == pytest.approx(best[0].rate)
            assert found[-1].usd_per_h == pytest.approx(best[0].usd_per_h)


def test_large_problems_are_solved_in_steps_close_to_the_best() -> None:
    """Two kinds of 1,024 GPUs: the best of all pairs of numbers, by cost per step, and by the least for a deadline."""
    trainers = {(0, n): 4000 / n for n in (8, 64, 512)}
    engines = {(0, 1): 900.0, (1, 1): 310.0}
    for objective, deadline_rate in (("cost", 0.0), ("deadline", 0.1)):
        p = Problem(
            have=(1024, 1024), usd_per_h=(7.0, 2.0), trainers=trainers, engines=engines, tokens=2e6, update_s=1.0,
            objective=objective, deadline_rate=deadline_rate,  # pyright: ignore
        )  # fmt: skip
        best = math.inf
        for (_, gpus), train_s in trainers.items():
            a, b = np.meshgrid(np.arange(1024 - gpus + 1), np.arange(1025))
            rate = p.rate(train_s, 900.0 * a + 310.0 * b)
            usd = 7.0 * (a + gpus) + 2.0 * b
            value = usd / rate if objective == "cost" else usd
            best = min(best, float(np.min(value[p.allowed(rate, usd)], initial=math.inf)))
        found = solve(p)[0]
        assert p.key(found.rate, found.usd_per_h)[0] < 1.03 * best
