"""Byte ranges of a file of weights, and the ranges that a part of its tensors has. Pure.

    ranges     sorted, disjoint, not adjacent, none empty: ((start, stop), ...), half open
    layout     which slices of which tensors a reader or a machine of the trainer has
    overlap    what a reader needs, chunk by chunk, with everybody who has it

A slice along the first dimension is one range; along another dimension it is many short ones. Chunks are what is read
and verified (manifest.py), so a reader reads every chunk that its ranges touch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from windfall.link.messages import Ranges
from windfall.weights.manifest import WIDTHS, TensorEntry


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Elements `first` to `first + count` of a tensor along a dimension; -1: the whole tensor."""

    name: str
    dim: int = -1
    first: int = 0
    count: int = 0


Layout = tuple[TensorSlice, ...]


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


def chunk_ranges(ranges: Ranges, bounds: Sequence[int]) -> Ranges:
    """The ranges grown to whole chunks. Chunk `i` has the bytes from `bounds[i]` to `bounds[i + 1]`.

    >>> chunk_ranges(((3, 5), (19, 20)), [0, 4, 8, 16, 20])
    ((0, 8), (16, 20))
    """
    return normal(
        (bounds[bisect_right(bounds, start) - 1], bounds[bisect_right(bounds, stop - 1)]) for start, stop in ranges
    )


def layout_ranges(entries: Sequence[TensorEntry], layout: Layout) -> Ranges:
    """The bytes of a layout in a file with these entries.

    >>> entry = TensorEntry(name="w", dtype="int16", shape=(3, 4), offset=64, nbytes=24)
    >>> layout_ranges([entry], (TensorSlice("w", 0, 1, 1),)), layout_ranges([entry], (TensorSlice("w", 1, 0, 3),))
    (((72, 80),), ((64, 70), (72, 78), (80, 86)))
    """
    by_name = {e.name: e for e in entries}
    pieces: list[tuple[int, int]] = []
    for s in layout:
        e = by_name[s.name]
        if s.dim < 0:
            pieces.append((e.offset, e.offset + e.nbytes))
            continue
        inner = WIDTHS[e.dtype] * math.prod(e.shape[s.dim + 1 :])  # bytes of one element of the dimension
        step = inner * e.shape[s.dim]
        for block in range(e.offset, e.offset + e.nbytes, step or 1):
            pieces.append((block + s.first * inner, block + (s.first + s.count) * inner))
    return normal(pieces)


def tensor_parallel(entries: Sequence[TensorEntry], rank: int, size: int, dims: Mapping[str, int]) -> Layout:
    """What a rank of a tensor-parallel engine needs: its share of the tensors in `dims` along that dimension, and all
    of the others. The first ranks have one element more if a dimension cannot be divided."""
    out = []
    for e in entries:
        dim = dims.get(e.name, -1)
        if dim < 0:
            out.append(TensorSlice(e.name))
            continue
        each, more = divmod(e.shape[dim], size)
        out.append(TensorSlice(e.name, dim, rank * each + min(rank, more), each + (rank < more)))
    return tuple(out)


def overlap(
    need: Ranges, holders: Mapping[str, Ranges], bounds: Sequence[int]
) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """The chunks that `need` touches, as parts (start, stop, who has all of it), in order and without overlap. A part
    is as long as the holders stay the same.

    >>> overlap(((0, 30),), {"a": ((0, 20),), "b": ((10, 40),)}, [0, 10, 20, 30, 40])
    ((0, 10, ('a',)), (10, 20, ('a', 'b')), (20, 30, ('b',)))
    """
    parts: list[tuple[int, int, tuple[str, ...]]] = []
    for start, stop in chunk_ranges(need, bounds):
        for i in range(bisect_right(bounds, start) - 1, bisect_right(bounds, stop - 1)):
            chunk = ((bounds[i], bounds[i + 1]),)
            who = tuple(sorted(name for name, held in holders.items() if covers(held, chunk)))
            if parts and parts[-1][1] == bounds[i] and parts[-1][2] == who:
                parts[-1] = parts[-1][0], bounds[i + 1], who
            else:
                parts.append((bounds[i], bounds[i + 1], who))
    return tuple(parts)
