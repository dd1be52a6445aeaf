"""The solvers against brute force, on random small problems."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random

import pytest

from windfall.plan.search import solvers
from windfall.plan.search.solvers import Problem, ReplicaOption, TrainOption, knapsack, solve

needs_scipy = pytest.mark.skipif(importlib.util.find_spec("scipy") is None, reason="pip install -e '.[plan]'")


def random_problem(seed: int) -> Problem:
    draw = random.Random(seed)
    kinds = draw.randint(1, 3)
    have = tuple(draw.randint(1, 6 - kinds) for _ in range(kinds))
    trainers = []
    for k in range(kinds):
        work_s = draw.uniform(50, 500)
        trainers += [TrainOption(k, n, work_s / n**0.9) for n in range(1, have[k] + 1) if draw.random() < 0.8]
    replicas = [
        ReplicaOption(k, tp, draw.uniform(100, 2000) * tp**0.8)
        for k in range(kinds) for tp in (1, 2, 4) if tp <= have[k]
    ]  # fmt: skip
    objective = draw.choice(["throughput", "cost", "deadline"])
    return Problem(
        have=have, usd_per_h=tuple(draw.uniform(0.5, 8) for _ in have), trainers=tuple(trainers),
        replicas=tuple(replicas), tokens=draw.uniform(1e4, 3e5), update_s=draw.choice([0.0, draw.uniform(0, 20)]),
        tail_s=draw.choice([0.0, draw.uniform(0, 100)]), overlapped=draw.random() < 0.6, hidden=draw.choice([0.0, 0.9]),
        objective=objective,  # pyright: ignore
        budget_usd_per_h=draw.choice([math.inf, draw.uniform(2, 30)]),
        deadline_rate=draw.uniform(1e-4, 2e-2) if objective == "deadline" else 0.0,
    )  # fmt: skip


def brute_force(p: Problem) -> tuple[float, ...] | None:
    """Every trainer with every number of every replica."""
    best = None
    ranges = [range(p.have[r.kind] // r.tp + 1) for r in p.replicas]
    for trainer in p.trainers:
        for counts in itertools.product(*ranges):
            used = [0] * len(p.have)
            used[trainer.kind] += trainer.gpus
            for r, n in zip(p.replicas, counts, strict=True):
                used[r.kind] += r.tp * n
            if any(u > h for u, h in zip(used, p.have, strict=True)):
                continue
            usd = sum(u * price for u, price in zip(used, p.usd_per_h, strict=True))
            rate = p.rate(trainer.step_s, sum(r.tok_per_s * n for r, n in zip(p.replicas, counts, strict=True)))
            if p.allowed(rate, usd):
                key = p.key(rate, usd)
                best = key if best is None or key < best else best
    return best


def gap(p: Problem, method: str) -> float | None:
    """How much worse than the best; None: neither finds a solution."""
    best, found = brute_force(p), solve(p, method=method)
    assert bool(found) == (best is not None)
    if best is None:
        return None
    split = found[0]
    used = [0] * len(p.have)
    used[split.trainer.kind] += split.trainer.gpus
    for r, n in split.replicas.items():
        used[r.kind] += r.tp * n
    assert all(u <= h for u, h in zip(used, p.have, strict=True))
    assert split.usd_per_h == pytest.approx(sum(u * x for u, x in zip(used, p.usd_per_h, strict=True)))
    assert p.allowed(split.rate, split.usd_per_h)
    return abs(p.key(split.rate, split.usd_per_h)[0] / best[0] - 1)


def test_enumeration_is_exact_on_300_random_problems() -> None:
    gaps = [g for seed in range(300) if (g := gap(random_problem(seed), "exact")) is not None]
    assert len(gaps) > 150
    assert max(gaps) < 1e-9


@needs_scipy
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_program_is_exact_on_random_problems(count: int) -> None:
    gaps = [g for seed in range(count) if (g := gap(random_problem(seed), "milp")) is not None]
    assert len(gaps) > count / 2
    assert max(gaps) < 1e-4


@needs_scipy
def test_program_is_solved_where_highs_fails_with_its_presolve() -> None:
    """HiGHS ended the third solve of this one with "Solve error", which was taken for "no solution"."""
    speeds = ((0, 1, 2519.2803453951633), (0, 2, 1303.0465890149128), (1, 1, 2740.2451117503083),
              (1, 2, 5664.540005621897), (1, 4, 12217.809290601594))  # fmt: skip
    p = Problem(
        have=(3, 4), usd_per_h=(2.7438667860935024, 3.7400755459827657),
        trainers=(TrainOption(0, 1, 70.98701934777918), TrainOption(0, 2, 98.16337464986164),
                  TrainOption(0, 3, 7.8879248283847305)),
        replicas=tuple(ReplicaOption(*row) for row in speeds), tokens=334364.5485803058, update_s=23.213675250124545,
        objective="cost", budget_usd_per_h=41.160742684554265,
    )  # fmt: skip
    assert gap(p, "milp") == pytest.approx(0.0, abs=1e-9)
    # HiGHS keeps constraints to 1e-6 only: the bound stays above the true rate, however many tangents it gets.
    program = solvers._Program(p)
    rows = len(program.rows)
    program.best()
    assert len(program.rows) - rows < 20


def test_bisection_finds_the_split_of_highest_throughput() -> None:
    for seed in range(300):
        p = random_problem(seed)
        full = tuple(
            TrainOption(k, n, 300 / n**0.9 * (k + 1)) for k, have in enumerate(p.have) for n in range(1, have + 1)
        )
        p = Problem(
            have=p.have, usd_per_h=p.usd_per_h, trainers=full, replicas=p.replicas, tokens=p.tokens,
            update_s=p.update_s,
        )  # fmt: skip
        exact, found = solve(p, method="exact"), solve(p, method="bisection")
        assert bool(exact) == bool(found)
        if exact:
            assert found[0].rate == pytest.approx(exact[0].rate)


def test_next_best_solutions_have_other_trainers_and_are_in_order() -> None:
    p = next(q for q in map(random_problem, range(100)) if len(solve(q, 3)) == 3)
    found = solve(p, 3)
    keys = [p.key(s.rate, s.usd_per_h) for s in found]
    assert keys == sorted(keys)
    assert len({s.trainer for s in found}) == 3


def test_knapsack_prefers_fewer_gpus_for_equal_speed() -> None:
    table = knapsack([ReplicaOption(0, 1, 3.0), ReplicaOption(0, 2, 6.0)], 4)
    assert [f.tok_per_s for f in table] == [0.0, 3.0, 6.0, 9.0, 12.0]
    assert knapsack([ReplicaOption(0, 2, 6.0)], 3)[3].used == 2


def test_nothing_to_choose_from_is_no_solution() -> None:
    assert solve(Problem(have=(1,), usd_per_h=(1.0,), trainers=(), replicas=(), tokens=1.0)) == []
