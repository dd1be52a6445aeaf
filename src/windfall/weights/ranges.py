"""Byte ranges of a file: sorted, disjoint, not adjacent, none empty: ((start, stop), ...), half open. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from windfall.link.messages import Ranges


def normal(pieces: Iterable[tuple[int, int]]) -> Ranges:
    """Ranges from pieces in any order, which may overlap.

    >>> normal([(5, 9), (0, 2), (2, 3), (7, 12), (4, 4)])
    ((0, 3), (5, 12))
    """
    out: list[tuple[int, int]] = []
    for start, stop in sorted(p for p in pieces if p[0] < p[1]):
        if out and start <= out[-1][1]:
            out[-1] = out[-1][0], max(stop, out[-1][1])
        else:
            out.append((start, stop))
    return tuple(out)


def union(a: Ranges, b: Ranges) -> Ranges:
    return normal([*a, *b])


def intersect(a: Ranges, b: Ranges) -> Ranges:
    """
    >>> intersect(((0, 4), (6, 9)), ((2, 7),))
    ((2, 4), (6, 7))
    """
    out, i, k = [], 0, 0
    while i < len(a) and k < len(b):
        start, stop = max(a[i][0], b[k][0]), min(a[i][1], b[k][1])
        if start < stop:
            out.append((start, stop))
        if a[i][1] < b[k][1]:
            i += 1
        else:
            k += 1
    return tuple(out)


def subtract(a: Ranges, b: Ranges) -> Ranges:
    """
    >>> subtract(((0, 9),), ((2, 4), (8, 20)))
    ((0, 2), (4, 8))
    """
    if not a:
        return ()
    edges = [a[0][0], *(n for piece in b for n in piece), a[-1][1]]
    return intersect(a, tuple((n, m) for n, m in zip(edges[::2], edges[1::2], strict=True) if n < m))


def covers(a: Ranges, b: Ranges) -> bool:
    """Whether `a` has all of `b`."""
    return not subtract(b, a)


def size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)
