"""Ranges against sets of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windfall.link.messages import Ranges
from windfall.weights import ranges as of_bytes

pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)
ranges = pieces.map(of_bytes.normal)


def members(of: Ranges) -> set[int]:
    return {n for start, stop in of for n in range(start, stop)}


def is_normal(of: Ranges) -> bool:
    edges = [n for piece in of for n in piece]
    return edges == sorted(set(edges))


@given(pieces, ranges, ranges)
def test_ranges_are_sets_of_bytes(some: list[tuple[int, int]], a: Ranges, b: Ranges) -> None:
    made = of_bytes.normal(some)
    assert members(made) == {n for start, stop in some for n in range(start, stop)}
    for found, want in (
        (made, members(made)),
        (of_bytes.union(a, b), members(a) | members(b)),
        (of_bytes.intersect(a, b), members(a) & members(b)),
        (of_bytes.subtract(a, b), members(a) - members(b)),
    ):
        assert members(found) == want
        assert is_normal(found)
        assert of_bytes.size(found) == len(want)
    assert of_bytes.covers(a, b) == (members(b) <= members(a))
