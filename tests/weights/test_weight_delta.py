"""A delta turns the old bytes into exactly the new ones. A damaged delta changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.weight_deltas import encode
from windfall.errors import WindfallError
from windfall.weights import delta, manifest
from windfall.weights.manifest import WIDTHS, Manifest

B = delta.BLOCK


def described(*tensors: tuple[str, int]) -> Manifest:
    rows = [(f"t{i}", dtype, (n,), i) for i, (dtype, n) in enumerate(tensors)]
    entries, nbytes = manifest.layout(rows)
    chunks = tuple(range(-(-nbytes // (1 << 20))))
    return manifest.make(version=0, entries=entries, nbytes=nbytes, chunk_bytes=1 << 20, chunks=chunks)


def random_bytes(m: Manifest, rng: np.random.Generator) -> np.ndarray:
    """Any bit pattern, including NaN payloads; zeros between tensors."""
    out = np.zeros(m.nbytes, np.uint8)
    for e in m.entries:
        out[e.offset : e.offset + e.nbytes] = rng.integers(0, 256, e.nbytes, np.uint8)
    return out


def change(m: Manifest, old: np.ndarray, density: float, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Change some elements by one bit. Returns the new bytes and the number of changes."""
    new, count = old.copy(), 0
    for e in m.entries:
        words = new[e.offset : e.offset + e.nbytes].view(f"<u{WIDTHS[e.dtype]}")
        where = rng.random(len(words)) < density
        words[where] ^= 1
        count += int(where.sum())
    return new, count


def encodings(blob: bytes) -> set[int]:
    rows = int(np.frombuffer(blob, "<u8", 1, 8)[0])
    return set(np.frombuffer(blob, delta.ROW, rows, 16)["encoding"].tolist())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from(["float32", "bfloat16", "int8", "int64"]), st.integers(0, 3000)),
        min_size=1,
        max_size=5,
    ),
    density=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.5, 0.97, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_delta_is_exact_for_any_change(sizes: list[tuple[str, int]], density: float, seed: int) -> None:
    m, rng = described(*sizes), np.random.default_rng(seed)
    old = random_bytes(m, rng)
    new, _ = change(m, old, density, rng)
    blob = encode(old, new, m, max_ratio=100)
    assert blob is not None
    got = old.copy()
    delta.apply(got, blob, m)
    assert (got == new).all()


@pytest.mark.parametrize(
    ("density", "encoding"), [(1.0, delta.BITMAP), (0.4, delta.BITMAP), (0.03, delta.GAPS), (0.0003, delta.POSITIONS)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shortest_index_is_chosen(dtype: str, density: float, encoding: int) -> None:
    m, rng = described((dtype, 3 * B + 77)), np.random.default_rng(1)
    old = random_bytes(m, rng)
    new, count = change(m, old, density, rng)
    blob = encode(old, new, m, max_ratio=2)
    assert blob is not None
    assert encoding in encodings(blob)
    index = {delta.BITMAP: (3 * B + 77) / 8, delta.GAPS: 1.01 * count, delta.POSITIONS: 2 * count}[encoding]
    assert len(blob) <= index + count * WIDTHS[dtype] + 16 + 4 * delta.ROW.itemsize + 8
    got = old.copy()
    delta.apply(got, blob, m)
    assert (got == new).all()


def test_nan_and_signed_zero_are_preserved() -> None:
    m = described(("float32", 4))
    old = np.array([0.0, np.nan, np.nan, 1.0], np.float32).view(np.uint8)
    new = old.copy()
    new[3] = 0x80  # -0.0, which equals 0.0
    new[8] = 1  # another NaN
    blob = encode(old, new, m, max_ratio=100)
    assert blob is not None
    got = old.copy()
    delta.apply(got, blob, m)
    assert (got == new).all()
    assert len(blob) > len(encode(old, old, m, max_ratio=100) or b"")


def test_no_delta_if_it_is_not_smaller() -> None:
    m, rng = described(("bfloat16", 100 * B)), np.random.default_rng(0)
    old = random_bytes(m, rng)
    assert encode(old, change(m, old, 1.0, rng)[0], m) is None
    assert encode(old, change(m, old, 0.9, rng)[0], m) is None
    half = encode(old, change(m, old, 0.5, rng)[0], m)
    assert half is not None
    assert len(half) < 0.6 * m.nbytes
    same = encode(old, old, m)
    assert same is not None
    assert len(same) == 16


def test_gives_up_early_on_a_sample_of_blocks() -> None:
    m, rng, seen = described(("bfloat16", 300 * B)), np.random.default_rng(0), []
    old = random_bytes(m, rng)

    def counting(work: Any, runs: Any) -> Any:
        seen.append(runs)
        return map(work, runs)

    assert encode(old, old ^ np.uint8(1), m, map_=counting) is None
    assert not seen
    assert encode(old, old, m, map_=counting) is not None
    assert seen


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_blob_is_refused_or_stays_in_bounds_and_is_never_half_applied(data: st.DataObject) -> None:
    m, rng = described(("float32", 700), ("bfloat16", 900), ("bfloat16", 300)), np.random.default_rng(5)
    old = random_bytes(m, rng)
    new = old.copy()
    for e, density in zip(m.entries, (0.9, 0.05, 0.004), strict=True):
        words = new[e.offset : e.offset + e.nbytes].view(f"<u{WIDTHS[e.dtype]}")
        words[rng.random(len(words)) < density] ^= 3
    blob = bytearray(encode(old, new, m) or b"")
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))
    if kind == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            blob[data.draw(st.integers(0, len(blob) - 1))] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
    else:
        blob += bytes(data.draw(st.integers(1, 9)))
    got = np.concatenate([old, np.full(64, 0xAB, np.uint8)])
    try:
        delta.apply(got, blob, m)
    except WindfallError:
        assert (got[: m.nbytes] == old).all()
    else:
        assert kind == "flip"  # of a value or a position: only the checksums of the result detect that
    assert (got[m.nbytes :] == 0xAB).all()
    outside = np.ones(m.nbytes, bool)
    for e in m.entries:
        outside[e.offset : e.offset + e.nbytes] = False
    assert (got[: m.nbytes][outside] == 0).all()


def row(block: int, changes: int, index: bytes, encoding: int, values: bytes) -> bytes:
    table = np.array([(block, changes, len(index), encoding)], delta.ROW)
    return delta.MAGIC + np.uint64(1).tobytes() + table.tobytes() + index + values


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"other",
        delta.MAGIC,
        delta.MAGIC + np.uint64(2**63).tobytes(),
        row(1, 1, b"\0", delta.GAPS, b"\0\0"),  # no such block
        row(0, 1, b"\x0a", delta.GAPS, b"\0\0"),  # element 11 of 10
        row(0, 2, b"\x09\x00", delta.GAPS, b"\0\0\0\0"),  # the second change is element 11
        row(0, 2, b"\x01", delta.GAPS, b"\0\0\0\0"),  # one position for two values
        row(0, 1, b"\x0a\x00", delta.POSITIONS, b"\0\0"),
        row(0, 2, b"\x05\x00\x05\x00", delta.POSITIONS, b"\0\0\0\0"),  # the same position twice
        row(0, 1, b"\x00\x04", delta.BITMAP, b"\0\0"),  # a bit after the last element
        row(0, 2, b"\x01\x00", delta.BITMAP, b"\0\0\0\0"),
        row(0, 1, b"\x01", delta.BITMAP, b"\0\0"),  # too short
        row(0, 1, b"\0", 7, b"\0\0"),
    ],
)
def test_inconsistent_blob_is_refused(blob: bytes) -> None:
    m, got = described(("bfloat16", 10)), np.arange(20, dtype=np.uint8)
    with pytest.raises(WindfallError, match="weight delta"):
        delta.apply(got, blob, m)
    assert (got == np.arange(20)).all()


@pytest.mark.parametrize("order", [(1, 0), (0, 0), (0, 2)])
def test_unordered_duplicate_or_unknown_blocks_are_refused(order: tuple[int, int]) -> None:
    m = described(("bfloat16", 10), ("bfloat16", 10))
    got = np.arange(m.nbytes, dtype=np.uint8)
    table = np.array([(n, 1, 1, delta.GAPS) for n in order], delta.ROW)
    blob = delta.MAGIC + np.uint64(2).tobytes() + table.tobytes() + b"\0\0" + b"\xff\xff\xff\xff"
    with pytest.raises(WindfallError, match="not in order"):
        delta.apply(got, blob, m)
    assert (got == np.arange(m.nbytes)).all()
