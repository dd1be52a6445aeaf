"""Which GPUs train: windfall's partition beside a general graph partitioner, and beside brute force.

    pip install mtkahypar                          Mt-KaHyPar (MIT), the successor of the library that AReaL-Hex names
    python benchmarks/plan/plan_partition.py      small random clusters, with the best partition known; large ones

A cluster has machines with 1 to 8 GPUs in one to four zones with random links. Some GPUs train, the others form
replicas, each within one machine. Mt-KaHyPar gets the graph of all GPUs, with bandwidths as weights of edges, and the
numbers of GPUs that train and that do not as weights of its two blocks; it cuts as little bandwidth as it can. What it
gives is counted as it is used: FSDP needs exactly that many GPUs, and every replica needs a machine. A partition is
better if the slowest link among its training GPUs is faster, or the mean over all pairs at the same slowest link.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from windfall.plan.search import partition
from windfall.plan.search.partition import Graph, Partition


class Case(NamedTuple):
    graph: Graph
    train: int
    replicas: tuple[int, ...]


def random_case(draw: random.Random, machines: int, sizes: Sequence[int]) -> Case:
    """A third to two thirds of the GPUs train; replicas fill what is left, by machine, so that they always fit."""
    zones = draw.randint(1, 4)
    network = [[0.0] * zones for _ in range(zones)]
    for a in range(zones):
        for b in range(a + 1):
            network[a][b] = network[b][a] = 1e9 * draw.choice([50, 25] if a == b else [25, 12, 5, 1])
    gpus = tuple(draw.choice(sizes) for _ in range(machines))
    graph = Graph(
        machines=gpus, zones=tuple(draw.randrange(zones) for _ in gpus), link=450e9, network=tuple(map(tuple, network))
    )
    train = max(2, round(sum(gpus) * draw.uniform(1 / 3, 2 / 3)))
    left, taken = list(gpus), 0
    while taken < train:
        n = draw.choice([n for n, free in enumerate(left) if free])
        left[n] -= 1
        taken += 1
    replicas = []
    for free in left:
        while free:
            size = draw.choice([s for s in (1, 2, 4, 8) if s <= free])
            replicas.append(size)
            free -= size
    return Case(graph, train, tuple(replicas))


def mt_kahypar(case: Case, library: Any, context: Any) -> tuple[int, ...] | None:
    """Training GPUs per machine; None: it does not keep the numbers, or the replicas do not fit."""
    graph, gpus = case.graph, [m for m, n in enumerate(case.graph.machines) for _ in range(n)]
    edges = list(combinations(range(len(gpus)), 2))
    zone = graph.zones
    weights = [
        round((graph.link if gpus[a] == gpus[b] else graph.network[zone[gpus[a]]][zone[gpus[b]]]) / 1e9)
        for a, b in edges
    ]
    made = library.create_graph(context, len(gpus), len(edges), edges, [1] * len(gpus), weights)
    context.set_individual_target_block_weights([case.train, len(gpus) - case.train])
    parts = made.partition(context)
    vector = [0] * len(graph.machines)
    for gpu, machine in enumerate(gpus):
        vector[machine] += parts.block_id(gpu) == 0
    left = [m - n for m, n in zip(graph.machines, vector, strict=True)]
    if sum(vector) != case.train or partition.pack(left, case.replicas) is None:
        return None
    return tuple(vector)


def compare(
    name: str, cases: Sequence[Case], best: Sequence[tuple[float, float]], solve: Callable[[Case], Any]
) -> None:
    found, slower, gaps, began = 0, 0, list[float](), time.process_time()
    answers = [solve(case) for case in cases]
    took = (time.process_time() - began) / len(cases)
    for case, answer, (slowest, mean) in zip(cases, answers, best, strict=True):
        if answer is None:
            continue
        found += 1
        score = case.graph.score(answer.training if isinstance(answer, Partition) else answer)
        slower += score[0] < slowest * (1 - 1e-9)
        gaps.append(1 - score[1] / mean)
    gap = f"{statistics.mean(gaps):.1%}, {max(gaps):.1%}" if gaps else "-"
    print(f"| {name} | {found} of {len(cases)} | {slower} | {gap} | {1e3 * took:.1f} ms |", flush=True)


def windfall(case: Case) -> Partition | None:
    return partition.partition(case.graph, case.train, case.replicas)


def best_partition(case: Case) -> Partition | None:
    """The best of all partitions, for small clusters."""
    best: Partition | None = None
    for vector in product(*(range(m + 1) for m in case.graph.machines)):
        if sum(vector) != case.train:
            continue
        slowest, mean = case.graph.score(vector)
        if best is None or (slowest, mean) > (best.slowest, best.mean):
            left = [m - n for m, n in zip(case.graph.machines, vector, strict=True)]
            if (placed := partition.pack(left, case.replicas)) is not None:
                best = Partition(training=vector, replicas=placed, slowest=slowest, mean=mean)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--machines", type=int, default=16, help="of a large cluster, with 8 GPUs each")
    o = parser.parse_args()
    library = context = None
    try:
        import mtkahypar  # pyright: ignore[reportMissingImports]

        library = mtkahypar.initialize(1)
        mtkahypar.set_seed(0)
        context = library.context_from_preset(mtkahypar.PresetType.QUALITY)
        context.set_partitioning_parameters(2, 0.0, mtkahypar.Objective.CUT)
        context.logging = False
    except ImportError:
        print("Mt-KaHyPar is not installed: pip install mtkahypar")
    draw = random.Random(0)
    for title, machines, sizes, count in (
        ("small", 5, (1, 2, 4, 8), o.cases),
        ("large", o.machines, (8,), max(10, o.cases // 10)),
    ):
        cases = [random_case(draw, machines, sizes) for _ in range(count)]
        exact = title == "small"
        reference = [(best_partition if exact else windfall)(c) for c in cases]
        best = [(p.slowest, p.mean) for p in reference if p is not None]
        cases = [c for c, p in zip(cases, reference, strict=True) if p is not None]
        print(f"\n{title} clusters, compared with {'the best partition' if exact else 'that of windfall'}")
        print("| method | usable partitions | slower slowest link | mean bandwidth lost: mean, worst | time |")
        print("|---|---|---|---|---|")
        compare("windfall", cases, best, windfall)
        if library is not None:
            compare("Mt-KaHyPar", cases, best, lambda c: mt_kahypar(c, library, context))


if __name__ == "__main__":
    main()
