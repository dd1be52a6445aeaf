"""Ranges against sets of bytes, layouts against numpy, and overlaps against brute force."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from windfall.link.messages import Ranges
from windfall.weights import slices
from windfall.weights.manifest import WIDTHS, TensorEntry, chunk_bounds, layout
from windfall.weights.slices import TensorSlice

pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)
ranges = pieces.map(slices.normal)


def members(of: Ranges) -> set[int]:
    return {n for start, stop in of for n in range(start, stop)}


def is_normal(of: Ranges) -> bool:
    edges = [n for piece in of for n in piece]
    return edges == sorted(set(edges))


@given(pieces, ranges, ranges)
def test_ranges_are_sets_of_bytes(some: list[tuple[int, int]], a: Ranges, b: Ranges) -> None:
    made = slices.normal(some)
    assert members(made) == {n for start, stop in some for n in range(start, stop)}
    for found, want in (
        (made, members(made)),
        (slices.union(a, b), members(a) | members(b)),
        (slices.intersect(a, b), members(a) & members(b)),
        (slices.subtract(a, b), members(a) - members(b)),
    ):
        assert members(found) == want
        assert is_normal(found)
        assert slices.size(found) == len(want)
    assert slices.covers(a, b) == (members(b) <= members(a))


@given(ranges, st.integers(1, 20), st.lists(st.integers(0, 60), max_size=3))
def test_whole_chunks_have_what_is_needed_and_no_chunk_more(need: Ranges, each: int, cuts: list[int]) -> None:
    bounds = chunk_bounds(60, each, cuts)
    grown = members(slices.chunk_ranges(need, bounds))
    chunks = [set(range(a, b)) for a, b in pairwise(bounds)]
    assert grown == set().union(*(c for c in chunks if c & members(need)))


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorEntry, ...]:
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
    dtypes = [draw(st.sampled_from(["int8", "bfloat16", "float32"])) for _ in shapes]
    return layout([(f"t{n}", dtypes[n], tuple(shape), n) for n, shape in enumerate(shapes)])[0]


@given(tensors(), st.data())
def test_a_layout_has_the_bytes_of_its_slices(entries: tuple[TensorEntry, ...], data: st.DataObject) -> None:
    chosen, want = [], set[int]()
    for e in entries:
        dim = data.draw(st.integers(-1, len(e.shape) - 1))
        first = data.draw(st.integers(0, e.shape[dim] - 1)) if dim >= 0 else 0
        count = data.draw(st.integers(0, e.shape[dim] - first)) if dim >= 0 else 0
        chosen.append(TensorSlice(e.name, dim, first, count))
        width = WIDTHS[e.dtype]
        at = (e.offset + np.arange(e.nbytes)).reshape(*e.shape, width)
        want |= set(at.ravel() if dim < 0 else np.take(at, range(first, first + count), axis=dim).ravel())
    found = slices.layout_ranges(entries, tuple(chosen))
    assert is_normal(found)
    assert members(found) == want


@given(tensors(), st.integers(1, 4), st.data())
def test_the_ranks_of_an_engine_have_every_byte_between_them(
    entries: tuple[TensorEntry, ...], size: int, data: st.DataObject
) -> None:
    dims = {e.name: data.draw(st.integers(-1, len(e.shape) - 1)) for e in entries}
    each = [slices.layout_ranges(entries, slices.tensor_parallel(entries, rank, size, dims)) for rank in range(size)]
    whole = slices.layout_ranges(entries, tuple(TensorSlice(e.name) for e in entries))
    assert set().union(*map(members, each)) == members(whole)
    divided = sum(e.nbytes for e in entries if dims[e.name] >= 0)
    assert sum(map(slices.size, each)) == divided + size * (math.fsum(e.nbytes for e in entries) - divided)


@given(ranges, st.dictionaries(st.sampled_from("abc"), ranges), st.integers(1, 20))
def test_an_overlap_names_everybody_who_has_a_chunk(need: Ranges, holders: dict[str, Ranges], each: int) -> None:
    bounds = chunk_bounds(60, each)
    parts = slices.overlap(need, holders, bounds)
    assert [n for start, stop, _ in parts for n in range(start, stop)] == sorted(
        members(slices.chunk_ranges(need, bounds))
    )
    for start, stop, who in parts:
        for a, b in pairwise(bounds):
            if start <= a < stop:
                assert who == tuple(sorted(n for n, held in holders.items() if set(range(a, b)) <= members(held)))
