"""Partitions against brute force over all ways to choose training GPUs."""

from __future__ import annotations

import itertools
import random

from windfall.plan.search.partition import link_score, pack, partition


def packs(free: list[int], sizes: list[int]) -> bool:
    """Whether the replicas fit, by trying every machine for each."""
    if not sizes:
        return True
    first, rest = sizes[0], sizes[1:]
    return any(f >= first and packs([*free[:n], f - first, *free[n + 1 :]], rest) for n, f in enumerate(free))


def case(seed: int) -> tuple[list[int], int, list[int]]:
    draw = random.Random(seed)
    machines = [draw.choice([1, 2, 3, 4, 8]) for _ in range(draw.randint(1, 4))]
    train = draw.randint(1, sum(machines))
    left, sizes = sum(machines) - train, list[int]()
    while left and draw.random() < 0.9:
        size = draw.choice([s for s in (1, 2, 4) if s <= left])
        sizes.append(size)
        left -= size
    return machines, train, sizes


def brute_force(machines: list[int], train: int, sizes: list[int]) -> float | None:
    scores = [
        link_score(v, 450e9, 12.5e9)
        for v in itertools.product(*(range(m + 1) for m in machines))
        if sum(v) == train and packs([m - n for m, n in zip(machines, v, strict=True)], sizes)
    ]
    return max(scores, default=None)


def test_exact_partition_is_the_best_and_the_greedy_one_is_close() -> None:
    gaps, missed, feasible = [], 0, 0
    for seed in range(400):
        machines, train, sizes = case(seed)
        best = brute_force(machines, train, sizes)
        exact = partition(machines, train, sizes, link=450e9, network=12.5e9)
        assert (exact is None) == (best is None)
        if exact is None or best is None:
            continue
        feasible += 1
        assert exact.score >= best * (1 - 1e-9)
        assert sum(exact.training) == train
        assert sorted(s for row in exact.replicas for s in row) == sorted(sizes)
        for size, training, row in zip(machines, exact.training, exact.replicas, strict=True):
            assert training + sum(row) <= size
        greedy = partition(machines, train, sizes, link=450e9, network=12.5e9, exact=False)
        if greedy is None:
            missed += 1
        else:
            gaps.append(1 - greedy.score / best)
    assert feasible > 200
    assert missed < 0.03 * feasible
    assert sum(gaps) / len(gaps) < 0.03


def test_packing_powers_of_two_is_exact() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        free = [draw.randint(0, 8) for _ in range(3)]
        sizes = [draw.choice([1, 2, 4]) for _ in range(draw.randint(0, 7))]
        assert (pack(free, sizes) is not None) == packs(free, sorted(sizes))


def test_large_clusters_use_whole_machines() -> None:
    found = partition([8] * 64, 128, [8] * 48, link=450e9, network=12.5e9)
    assert found is not None
    assert sorted(found.training) == [0] * 48 + [8] * 16
