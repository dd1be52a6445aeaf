"""Solutions of the search keep their limits, and are in order."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from windfall.plan.search.frontier import Counts, Problem, fastest_by_price, solve


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


def test_solutions_keep_the_limits_and_are_in_order() -> None:
    solved = 0
    for seed in range(300):
        p = random_problem(seed)
        found = solve(p, 1000)
        solved += bool(found)
        keys = [p.key(s.rate, s.usd_per_h) for s in found]
        assert keys == sorted(keys)
        for s in found:
            gpus = used(p, s.counts)
            assert all(u <= h for u, h in zip(gpus, p.have, strict=True))
            assert s.usd_per_h == pytest.approx(sum(u * x for u, x in zip(gpus, p.usd_per_h, strict=True)))
            speed = sum(p.engines[engine] * n for engine, n in s.counts.engines.items())
            assert s.rate == pytest.approx(p.rate(p.trainers[s.counts.trainer], speed))
            assert p.allowed(s.rate, s.usd_per_h)
    assert solved > 150


def test_no_trainer_is_faster_with_all_gpus_than_what_is_found_for_it() -> None:
    for seed in range(100):
        p = replace(random_problem(seed), objective="throughput", budget_usd_per_h=math.inf)
        p = replace(p, engines={(k, tp): speed for (k, tp), speed in p.engines.items() if tp == 1})
        found = solve(p, 1000)
        for (kind, gpus), train_s in p.trainers.items():
            speed = sum(x * (p.have[k] - gpus * (k == kind)) for (k, _), x in p.engines.items())
            best = max((s.rate for s in found if s.counts.trainer == (kind, gpus)), default=0.0)
            assert speed == 0 or best == pytest.approx(p.rate(train_s, speed))


def test_of_many_solutions_the_best_ones_have_other_trainers_and_the_rest_are_faster_than_cheaper_ones() -> None:
    trainers = {(0, n): 4000 / n for n in range(1, 65)}
    p = Problem(
        have=(1024, 1024), usd_per_h=(7.0, 2.0), trainers=trainers, engines={(0, 1): 900.0, (1, 1): 310.0},
        tokens=2e6, update_s=1.0, objective="cost",
    )  # fmt: skip
    found = solve(p, 32)
    assert len({s.counts.trainer for s in found[:16]}) == 16
    rest = found[16:]
    assert [s.usd_per_h for s in rest] == sorted(s.usd_per_h for s in rest)
    assert [s.rate for s in rest] == sorted(s.rate for s in rest)
    best = solve(p, 10_000)[0]
    assert p.key(found[0].rate, found[0].usd_per_h) == p.key(best.rate, best.usd_per_h)


def test_plans_of_one_price_are_shown_once() -> None:
    assert fastest_by_price([(1.0, 1.0), (2.0, 1.0)], 8) == [1]


def test_nothing_to_choose_from_is_no_solution() -> None:
    assert solve(Problem(have=(1,), usd_per_h=(1.0,), trainers={}, engines={}, tokens=1.0), 8) == []
