"""Phase 2: which individual GPUs train and which form replicas. Pure.

GPUs are the vertices of a graph, links its edges: fast within a machine, slow between machines. For given counts, the
best partition has the largest link bandwidth among the training GPUs, summed over pairs, while every replica still fits
into one machine. GPUs of a kind are alike, so a partition is a number of training GPUs per machine:

    exact     every such vector, up to equal machines; small clusters
    greedy    fill the largest machines first, then move single GPUs while that helps; large clusters

Replica sizes are powers of two, so placing the largest first packs them whenever they can be packed at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

EXACT_LIMIT = 20_000
"""Largest number of vectors that are enumerated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    training: tuple[int, ...]
    """Training GPUs of every machine."""
    replicas: tuple[tuple[int, ...], ...]
    """Sizes of the replicas of every machine."""
    score: float
    """Mean bandwidth between two training GPUs, in bytes per second."""
    exact: bool


def link_score(training: Sequence[int], link: float, network: float) -> float:
    """Mean bandwidth between two training GPUs.

    >>> link_score([2, 0], 100.0, 10.0), link_score([1, 1], 100.0, 10.0), link_score([1], 100.0, 10.0)
    (100.0, 10.0, 100.0)
    """
    total = sum(training)
    pairs = total * (total - 1) / 2
    if not pairs:
        return link
    inside = sum(n * (n - 1) / 2 for n in training)
    return (inside * link + (pairs - inside) * network) / pairs


def pack(left: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Put replicas into machines with this many free GPUs, the largest replica first into the fullest machine that has
    room. None: they do not fit.

    >>> pack([3, 4], [2, 4])
    ((2,), (4,))
    >>> pack([3, 3], [4]) is None
    True
    """
    free, out = list(left), [list[int]() for _ in left]
    for size in sorted(sizes, reverse=True):
        room = [n for n, f in enumerate(free) if f >= size]
        if not room:
            return None
        chosen = min(room, key=lambda n: free[n])
        free[chosen] -= size
        out[chosen].append(size)
    return tuple(map(tuple, out))


def partition(
    machines: Sequence[int], train: int, sizes: Sequence[int], *, link: float, network: float,
    exact: bool | None = None,
) -> Partition | None:  # fmt: skip
    """The best partition of machines with this many GPUs each. None: the replicas do not fit in any."""
    small = vectors(machines, train) <= EXACT_LIMIT
    if exact is None:
        exact = small
    candidates = _all(machines, train) if exact else _greedy(machines, train, sizes)
    best: Partition | None = None
    for vector in candidates:
        score = link_score(vector, link, network)
        if best is not None and score <= best.score * (1 + 1e-12):
            continue
        placed = pack([m - n for m, n in zip(machines, vector, strict=True)], sizes)
        if placed is not None:
            best = Partition(training=vector, replicas=placed, score=score, exact=exact)
    return best


def vectors(machines: Sequence[int], train: int) -> int:
    """Upper bound on the number of vectors, equal machines counted once."""
    total = 1
    for size in set(machines):
        count, most = machines.count(size), min(size, train)
        total *= math.comb(count + most, most)
        if total > EXACT_LIMIT:
            return total
    return total


def _all(machines: Sequence[int], train: int) -> Iterator[tuple[int, ...]]:
    """Every vector, with the numbers of equal machines in descending order."""
    order = sorted(range(len(machines)), key=lambda n: -machines[n])

    def choose(at: int, left: int, before: int) -> Iterator[tuple[int, ...]]:
        if at == len(order):
            if left == 0:
                yield ()
            return
        size = machines[order[at]]
        most = min(size, left)
        if at and machines[order[at - 1]] == size:
            most = min(most, before)
        if left > sum(machines[n] for n in order[at:]):
            return
        for n in range(most, -1, -1):
            for rest in choose(at + 1, left - n, n):
                yield (n, *rest)

    for chosen in choose(0, train, train):
        vector = [0] * len(machines)
        for n, value in zip(order, chosen, strict=True):
            vector[n] = value
        yield tuple(vector)


def _greedy(machines: Sequence[int], train: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """A few vectors that fill whole machines, each repaired by moving GPUs until the replicas fit."""
    for reverse in (True, False):
        order = sorted(range(len(machines)), key=lambda n: machines[n], reverse=reverse)
        vector, left = [0] * len(machines), train
        while left > 0 and (open_ := [n for n in order if not vector[n]]):
            # A machine that is exactly as large as the rest is best: nothing of another machine is broken up.
            fitting = [n for n in open_ if machines[n] == left]
            chosen = fitting[0] if fitting else open_[0]
            if not fitting and machines[chosen] > left:
                chosen = min((n for n in open_ if machines[n] > left), key=lambda n: machines[n])
            vector[chosen] = min(machines[chosen], left)
            left -= vector[chosen]
        if left:
            return
        yield from _repaired(machines, vector, sizes)


def _repaired(machines: Sequence[int], vector: list[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    yield tuple(vector)
    free = [m - n for m, n in zip(machines, vector, strict=True)]
    if pack(free, sizes) is not None:
        return
    for a in [n for n, v in enumerate(vector) if v]:  # one machine trains less, another one more
        for b in [n for n, f in enumerate(free) if f and n != a]:
            for moved in range(1, min(vector[a], free[b]) + 1):
                other = list(vector)
                other[a] -= moved
                other[b] += moved
                yield tuple(other)
