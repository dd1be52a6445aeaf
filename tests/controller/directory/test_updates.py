"""The cheapest way to the wanted weights, beside all ways."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.directory.updates import plan, result
from windfall.link.messages import FileRef

names = st.sampled_from("abcde")
copies = st.builds(lambda name, n: FileRef(digest=name, nbytes=n), names, st.integers(1, 50))
deltas = st.builds(
    lambda a, b, n: FileRef(digest=f"{a}{b}", nbytes=n, before=a, after=b), names, names, st.integers(1, 50)
)
adapters = st.builds(lambda base, n: FileRef(digest=f"+{base}", nbytes=n, before=base), names, st.integers(1, 9))
files = st.lists(copies | deltas | adapters, max_size=7, unique_by=lambda f: f.digest)


def all_ways(held: Collection[str], wanted: str, files: list[FileRef]) -> Iterator[tuple[FileRef, ...]]:
    """Every way without a file twice."""

    def on(at: str, path: tuple[FileRef, ...]) -> Iterator[tuple[FileRef, ...]]:
        if at == wanted:
            yield path
        for file in files:
            if file.before == at and file not in path:
                yield from on(result(file), (*path, file))

    for start in {"", *held}:
        yield from on(start, ())


@given(st.sets(names, max_size=2), st.sampled_from(["a", "e", "+a"]), files, st.floats(0.1, 10), st.floats(0, 20))
def test_no_way_is_shorter(held: set[str], wanted: str, files: list[FileRef], rate: float, apply_s: float) -> None:
    def cost_s(path: tuple[FileRef, ...]) -> float:
        return sum(f.nbytes for f in path) / rate + (apply_s if any(f.after for f in path) else 0)

    found = plan(held, wanted, files, bytes_per_s=rate, apply_s=apply_s)
    ways = list(all_ways(held, wanted, files))
    assert (found is None) == (not ways)
    if found is not None:
        assert found in ways
        assert cost_s(found) == pytest.approx(min(map(cost_s, ways)))
        assert found == plan(held, wanted, files[::-1], bytes_per_s=rate, apply_s=apply_s)


def test_a_fast_link_takes_the_copy() -> None:
    copy = FileRef(digest="v5", nbytes=16 * 10**9)
    chain = [
        FileRef(digest="d4", nbytes=5 * 10**8, before="v3", after="v4"),
        FileRef(digest="d5", nbytes=5 * 10**8, before="v4", after="v5"),
    ]
    assert plan(["v3"], "v5", [copy, *chain], bytes_per_s=1e8, apply_s=4) == tuple(chain)
    assert plan(["v3"], "v5", [copy, *chain], bytes_per_s=1e10, apply_s=4) == (copy,)
    assert plan(["v5"], "v5", [copy, *chain], bytes_per_s=1e8, apply_s=4) == ()
    assert plan(["v2"], "v5", chain, bytes_per_s=1e8, apply_s=4) is None


def test_an_old_copy_and_deltas_where_the_bucket_has_no_newer_copy() -> None:
    old = FileRef(digest="v3", nbytes=100)
    delta = FileRef(digest="d4", nbytes=5, before="v3", after="v4")
    assert plan([], "v4", [delta, old], bytes_per_s=1, apply_s=1) == (old, delta)


def test_an_adapter_needs_its_base() -> None:
    base, adapter = FileRef(digest="base", nbytes=100), FileRef(digest="a7", nbytes=1, before="base")
    assert plan([], "a7", [adapter, base], bytes_per_s=1, apply_s=9) == (base, adapter)
    assert plan(["base", "a6"], "a7", [adapter, base], bytes_per_s=1, apply_s=9) == (adapter,)
