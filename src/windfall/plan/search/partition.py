"""Phase 2: which individual GPUs train and which form replicas. Pure.

GPUs are the vertices of a graph, links its edges: fast within a machine, slower between machines, and often still
slower between zones. For given counts, FSDP is as fast as the slowest link among the training GPUs, because its rings
pass them all. So the best partition is the one whose slowest link is the fastest; of those, the one with the largest
bandwidth over all pairs; while every replica still fits into one machine. GPUs of a machine are alike, so a partition
is a number of training GPUs per machine: from every zone outwards whole machines are filled, then GPUs are moved while
that helps.

Replica sizes are powers of two, so placing the largest first packs them whenever they can be packed at all, whichever
machines are preferred: those that train, which need not pull new weights, then those with the best link to them.

`benchmarks/plan/plan_partition.py` compares it with KaHyPar, a general graph partitioner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOVES = 50
"""Largest number of improvements of a partition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """Machines of one kind: GPUs of each, the zone of each, and bytes per second within and between them."""

    machines: tuple[int, ...]
    zones: tuple[int, ...]
    link: float
    """Between two GPUs of one machine."""
    network: tuple[tuple[float, ...], ...]
    """Between two machines, by their zones."""

    @classmethod
    def uniform(cls, machines: Sequence[int], link: float, network: float) -> Graph:
        """Machines of one zone."""
        return cls(machines=tuple(machines), zones=(0,) * len(machines), link=link, network=((network,),))

    def score(self, training: Sequence[int]) -> tuple[float, float]:
        """The slowest bandwidth of the links between training GPUs, and the mean over all pairs.

        >>> two = Graph.uniform([2, 2], 100.0, 10.0)
        >>> two.score([2, 0]), two.score([1, 1]), two.score([1, 0])
        ((100.0, 100.0), (10.0, 10.0), (100.0, 100.0))
        >>> Graph(machines=(1, 1, 1), zones=(0, 0, 1), link=9.0, network=((5.0, 1.0), (1.0, 5.0))).score([1, 0, 1])
        (1.0, 1.0)
        """
        gpus, squares, used = Counter[int](), Counter[int](), Counter[int]()
        for n, zone in zip(training, self.zones, strict=True):
            if n:
                gpus[zone] += n
                squares[zone] += n * n
                used[zone] += 1
        total = sum(gpus.values())
        pairs = total * (total - 1) / 2
        if not pairs:
            return self.link, self.link
        zones = list(gpus)
        weight = sum((squares[z] - gpus[z]) / 2 * self.link for z in zones)
        weight += sum((gpus[z] ** 2 - squares[z]) / 2 * self.network[z][z] for z in zones)
        weight += sum(gpus[a] * gpus[b] * self.network[a][b] for n, a in enumerate(zones) for b in zones[:n])
        links = [self.link] + [self.network[z][z] for z in zones if used[z] > 1]
        links += [self.network[a][b] for n, a in enumerate(zones) for b in zones[:n]]
        return min(links), weight / pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    training: tuple[int, ...]
    """Training GPUs of every machine."""
    replicas: tuple[tuple[int, ...], ...]
    """Sizes of the replicas of every machine."""
    slowest: float
    """Bytes per second of the slowest link between two training GPUs."""
    mean: float
    """Mean bandwidth between two training GPUs, in bytes per second."""


def pack(left: Sequence[int], sizes: Sequence[int], prefer: Sequence[float] = ()) -> tuple[tuple[int, ...], ...] | None:
    """Put replicas into machines with this many free GPUs, the largest replica first: into the machine that is
    preferred most, of those into one that has replicas already, then into the fullest. None: they do not fit.

    >>> pack([3, 4], [2, 4])
    ((2,), (4,))
    >>> pack([3, 4], [2, 1], prefer=[0.0, 1.0])
    ((), (2, 1))
    >>> pack([3, 3], [4]) is None
    True
    """
    free, out = list(left), [list[int]() for _ in left]
    wanted = list(prefer) or [0.0] * len(free)
    for size, count in sorted(Counter(sizes).items(), reverse=True):
        for n in sorted(range(len(free)), key=lambda n: (-wanted[n], not out[n], free[n])):
            here = min(count, free[n] // size)
            free[n] -= here * size
            out[n] += [size] * here
            count -= here
            if not count:
                break
        else:
            return None
    return tuple(map(tuple, out))


def partition(graph: Graph, train: int, sizes: Sequence[int], *, near: Sequence[float] = ()) -> Partition | None:
    """The best partition that is found. `near`: of every machine, bytes per second from GPUs of another kind that
    train. None: the replicas do not fit in any."""
    best: Partition | None = None
    for vector in _vectors(graph, train, sizes):
        slowest, mean = graph.score(vector)
        if best is not None and (slowest, mean) <= (best.slowest, best.mean * (1 + 1e-12)):
            continue
        left = [m - n for m, n in zip(graph.machines, vector, strict=True)]
        placed = pack(left, sizes, _preferred(graph, vector, near))
        if placed is not None:
            best = Partition(training=vector, replicas=placed, slowest=slowest, mean=mean)
    return best


def _preferred(graph: Graph, training: Sequence[int], near: Sequence[float]) -> list[float]:
    """Bytes per second at which a machine gets new weights; infinite on a machine that trains."""
    sources = {zone for zone, n in zip(graph.zones, training, strict=True) if n}
    out = []
    for m, (zone, n) in enumerate(zip(graph.zones, training, strict=True)):
        links = [graph.network[zone][source] for source in sources] + ([near[m]] if near else [])
        out.append(math.inf if n else max(links, default=0.0))
    return out


def _vectors(graph: Graph, train: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """A few vectors that fill whole machines, from every zone outwards, each repaired by moving GPUs until the replicas
    fit, and then improved by moving GPUs."""
    if not train:
        yield (0,) * len(graph.machines)
        return
    for zone in sorted(set(graph.zones)):
        for largest in (True, False):
            vector = _filled(graph, train, zone, largest)
            if vector is None:
                return
            yield from _improved(graph, vector, sizes)


def _filled(graph: Graph, train: int, zone: int, largest: bool) -> list[int] | None:
    """Whole machines, those with the best links to this zone first. None: there are not enough GPUs."""
    machines = graph.machines
    near = [graph.network[zone][z] if z != zone else math.inf for z in graph.zones]
    order = sorted(range(len(machines)), key=lambda n: (-near[n], machines[n] * (-1 if largest else 1)))
    vector, left = [0] * len(machines), train
    while left > 0:
        open_ = [n for n in order if not vector[n]]
        if not open_:
            return None
        open_ = [n for n in open_ if near[n] == near[open_[0]]]
        # A machine that is exactly as large as the rest is best: nothing of another machine is broken up.
        fitting = [n for n in open_ if machines[n] == left]
        chosen = fitting[0] if fitting else open_[0]
        if not fitting and machines[chosen] > left:
            chosen = min((n for n in open_ if machines[n] > left), key=lambda n: machines[n])
        vector[chosen] = min(machines[chosen], left)
        left -= vector[chosen]
    return vector


def _fits(graph: Graph, vector: Sequence[int], sizes: Sequence[int]) -> bool:
    return pack([m - n for m, n in zip(graph.machines, vector, strict=True)], sizes) is not None


def _moves(graph: Graph, vector: Sequence[int]) -> Iterator[list[int]]:
    """One machine trains less, another one more. Equal machines with equal numbers are tried once."""
    seen = set[tuple[object, ...]]()
    state = list(zip(graph.machines, graph.zones, vector, strict=True))
    for a in [n for n, v in enumerate(vector) if v]:
        for b in [n for n, (size, _, v) in enumerate(state) if size > v and n != a]:
            if (state[a], state[b]) in seen:
                continue
            seen.add((state[a], state[b]))
            for moved in range(1, min(vector[a], graph.machines[b] - vector[b]) + 1):
                other = list(vector)
                other[a] -= moved
                other[b] += moved
                yield other


def _improved(graph: Graph, vector: list[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The vector if the replicas fit, then always the best one that is one move away, as long as it is better."""
    now = (0.0, 0.0)
    if _fits(graph, vector, sizes):
        now = graph.score(vector)
        yield tuple(vector)
    for _ in range(MOVES):
        better = [other for other in _moves(graph, vector) if graph.score(other) > now]
        fitting = next((o for o in sorted(better, key=graph.score, reverse=True) if _fits(graph, o, sizes)), None)
        if fitting is None:
            return
        vector, now = fitting, graph.score(fitting)
        yield tuple(vector)
