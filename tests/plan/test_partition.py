"""Partitions against brute force over all ways to choose training GPUs."""

from __future__ import annotations

import itertools
import random

import pytest

from windfall.plan.search.partition import Graph, pack, partition


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


def zoned(seed: int) -> tuple[Graph, int, list[int]]:
    """Machines in up to three zones, with random links between them."""
    machines, train, sizes = case(seed)
    draw = random.Random(seed)
    zones = draw.randint(1, 3)
    network = [[0.0] * zones for _ in range(zones)]
    for a in range(zones):
        for b in range(a + 1):
            network[a][b] = network[b][a] = draw.choice([50e9, 12.5e9]) if a == b else draw.choice([12.5e9, 5e9, 1e9])
    return Graph(
        machines=tuple(machines), zones=tuple(draw.randrange(zones) for _ in machines), link=450e9,
        network=tuple(map(tuple, network)),
    ), train, sizes  # fmt: skip


def pairwise(graph: Graph, training: tuple[int, ...]) -> tuple[float, float]:
    """The slowest link and the mean over all pairs of training GPUs, one pair after the other."""
    gpus = [machine for machine, n in enumerate(training) for _ in range(n)]
    links = [
        graph.link if a == b else graph.network[graph.zones[a]][graph.zones[b]]
        for n, a in enumerate(gpus) for b in gpus[:n]
    ]  # fmt: skip
    return (min(links), sum(links) / len(links)) if links else (graph.link, graph.link)


def brute_force(graph: Graph, train: int, sizes: list[int]) -> tuple[float, float] | None:
    scores = [
        pairwise(graph, v)
        for v in itertools.product(*(range(m + 1) for m in graph.machines))
        if sum(v) == train and packs([m - n for m, n in zip(graph.machines, v, strict=True)], sizes)
    ]
    return max(scores, default=None)


@pytest.mark.parametrize("zones", [False, True])
def test_partition_is_close_to_the_best(zones: bool) -> None:
    gaps, missed, slower, feasible = [], 0, 0, 0
    for seed in range(400):
        machines, train, sizes = case(seed)
        graph = zoned(seed)[0] if zones else Graph.uniform(machines, 450e9, 12.5e9)
        best, found = brute_force(graph, train, sizes), partition(graph, train, sizes)
        if best is None:
            assert found is None
            continue
        feasible += 1
        if found is None:
            missed += 1
            continue
        assert (found.slowest, found.mean) == pytest.approx(pairwise(graph, found.training))
        assert sum(found.training) == train
        assert sorted(s for row in found.replicas for s in row) == sorted(sizes)
        for size, training, row in zip(machines, found.training, found.replicas, strict=True):
            assert training + sum(row) <= size
        slower += found.slowest < best[0]
        gaps.append(max(0.0, 1 - found.mean / best[1]))
    assert feasible > 200
    assert missed < 0.03 * feasible
    assert slower < 0.03 * feasible
    assert sum(gaps) / len(gaps) < 0.03


def test_packing_powers_of_two_is_exact() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        free = [draw.randint(0, 8) for _ in range(3)]
        sizes = [draw.choice([1, 2, 4]) for _ in range(draw.randint(0, 7))]
        wanted = [draw.random() for _ in free]
        assert (pack(free, sizes, wanted) is not None) == (pack(free, sizes) is not None) == packs(free, sorted(sizes))


def test_large_clusters_use_whole_machines() -> None:
    found = partition(Graph.uniform([8] * 64, 450e9, 12.5e9), 128, [8] * 48)
    assert found is not None
    assert sorted(found.training) == [0] * 48 + [8] * 16


def test_large_clusters_train_in_one_zone() -> None:
    """Sixteen machines of each of four zones, which are mixed in the list; no zone has a machine to spare."""
    slow = [[50e9 if a == b else 1e9 for b in range(4)] for a in range(4)]
    graph = Graph(
        machines=(8,) * 64, zones=tuple(n * 7 % 4 for n in range(64)), link=450e9, network=tuple(map(tuple, slow))
    )
    found = partition(graph, 128, [8] * 48)
    assert found is not None
    assert found.slowest == 50e9
    assert len({zone for zone, n in zip(graph.zones, found.training, strict=True) if n}) == 1


def test_engines_are_placed_where_weights_arrive_first() -> None:
    network = ((12.5e9, 1e9), (1e9, 12.5e9))
    graph = Graph(machines=(2, 8, 8, 8), zones=(0, 1, 0, 1), link=450e9, network=network)
    found = partition(graph, 6, [1, 1, 1, 1])
    assert found is not None
    trains = found.training.index(6)
    assert found.replicas[trains] == (1, 1)  # the trainer's machine first, which need not pull
    others = [n for n, row in enumerate(found.replicas) if row and n != trains]
    assert [graph.zones[n] for n in others] == [graph.zones[trains]]
    far = partition(graph, 0, [1] * 8, near=[1e9, 1e9, 1e9, 5e9])
    assert far is not None
    assert far.replicas[3] == (1,) * 8
