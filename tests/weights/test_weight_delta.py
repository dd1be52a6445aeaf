"""A delta turns the old bytes into exactly the new ones. A damaged delta changes nothing."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.weights.weight_deltas import encode
from windfall.errors import WindfallError
from windfall.weights import delta, manifest
from windfall.weights.manifest import WIDTHS, Manifest
from windfall.weights.publishing import row_writer

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def described(*tensors: tuple[str, int], chunk_bytes: int = 1 << 20) -> Manifest:
    rows = [(f"t{i}", dtype, (n,), i) for i, (dtype, n) in enumerate(tensors)]
    entries, nbytes = manifest.layout(rows)
    count = -(-nbytes // chunk_bytes)
    hashes = {"chunks": bytes(8 * count), "seals": bytes(32 * count)}
    return manifest.make(entries=entries, nbytes=nbytes, chunk_bytes=chunk_bytes, **hashes)


def random_bytes(m: Manifest, rng: np.random.Generator) -> np.ndarray:
    """Any bit pattern, including NaN payloads; zeros between tensors."""
    out = np.zeros(m.nbytes, np.uint8)
    for e in m.entries:
        out[e.offset : e.offset + e.nbytes] = rng.integers(0, 256, e.nbytes, np.uint8)
    return out


def change(
    m: Manifest, old: np.ndarray, density: float, rng: np.random.Generator, any_value: bool = False
) -> tuple[np.ndarray, int]:
    """Change some elements by one bit, or several. Returns the new bytes and the number of changes."""
    new, count = old.copy(), 0
    for e in m.entries:
        words = new[e.offset : e.offset + e.nbytes].view(f"<u{WIDTHS[e.dtype]}")
        where = rng.random(len(words)) < density
        words[where] ^= rng.integers(1, 256, int(where.sum()), np.uint8) if any_value else 1
        count += int(where.sum())
    return new, count


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.sampled_from(["float32", "bfloat16", "int8", "int64"]), st.integers(0, 3000)),
        min_size=1,
        max_size=5,
    ),
    density=st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.5, 0.97, 1.0]),
    slab_bytes=st.sampled_from([64, 512, row_writer.SLAB_BYTES]),
    pack=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_delta_is_exact_for_any_change(
    sizes: list[tuple[str, int]], density: float, slab_bytes: int, pack: bool, seed: int
) -> None:
    m, rng = described(*sizes, chunk_bytes=64), np.random.default_rng(seed)
    assume(m.nbytes)
    old = random_bytes(m, rng)
    new, _ = change(m, old, density, rng, any_value=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_writer, "SLAB_BYTES", slab_bytes)
        patch.setattr(row_writer, "MAX_RATIO", 1000)
        blob = encode(old, new, m, max_ratio=1000, pack=pack)
    assert blob is not None
    got = old.copy()
    delta.apply(got, blob, m)
    assert (got == new).all()


@pytest.mark.parametrize("density", [0.6, 0.03, 0.0003])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=cuda)])
def test_change_takes_its_value_and_one_byte(where: str, dtype: str, density: float) -> None:
    elements = 200_077
    m, rng = described((dtype, elements)), np.random.default_rng(1)
    old = random_bytes(m, rng)
    new, count = change(m, old, density, rng)
    blob = encode(old, new, m, max_ratio=2, where=where)
    assert blob is not None
    most = count * (WIDTHS[dtype] + 1) + elements // delta.SKIP + delta.HEAD_BYTES + delta.ROW.itemsize
    assert count * (WIDTHS[dtype] + 1) < len(blob) <= most
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
    m, rng = described(("bfloat16", 500_000)), np.random.default_rng(0)
    old = random_bytes(m, rng)
    assert encode(old, change(m, old, 1.0, rng)[0], m) is None
    assert encode(old, change(m, old, 0.7, rng)[0], m) is None
    half = encode(old, change(m, old, 0.5, rng)[0], m)
    assert half is not None
    assert len(half) < 0.8 * m.nbytes
    same = encode(old, old, m)
    assert same is not None
    assert len(same) == delta.HEAD_BYTES


def test_first_large_slab_that_changed_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tensor that changed everywhere, such as a norm, does not."""
    monkeypatch.setattr(row_writer, "SLAB_BYTES", 1 << 12)
    compared, encode_slab = [], row_writer.encode

    def compare(slab: row_writer.Slab, *args: Any) -> Any:
        compared.append(slab)
        return encode_slab(slab, *args)

    monkeypatch.setattr(row_writer, "encode", compare)
    m, rng = described(("bfloat16", 100), ("bfloat16", 100_000), chunk_bytes=1 << 12), np.random.default_rng(0)
    old = random_bytes(m, rng)
    new = old.copy()
    new[:200] ^= 1
    assert encode(old, new, m) is not None
    new[4096:] ^= 1
    compared.clear()
    assert encode(old, new, m, max_ratio=1000) is None
    assert len(compared) == 2


@settings(max_examples=300, deadline=None)
@given(data=st.data(), pack=st.booleans())
def test_damaged_blob_is_refused_or_stays_in_bounds_and_is_never_half_applied(data: st.DataObject, pack: bool) -> None:
    m, rng = described(("float32", 700), ("bfloat16", 900), ("bfloat16", 300)), np.random.default_rng(5)
    old = random_bytes(m, rng)
    new = old.copy()
    for e, density in zip(m.entries, (0.9, 0.05, 0.004), strict=True):
        words = new[e.offset : e.offset + e.nbytes].view(f"<u{WIDTHS[e.dtype]}")
        words[rng.random(len(words)) < density] ^= 3
    blob = bytearray(encode(old, new, m, pack=pack) or b"")
    whole, kind = bytes(blob), data.draw(st.sampled_from(["flip", "cut", "grow"]))
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
        # Only the checksums of the result detect another value or position, or a missing part.
        assert kind == "flip" or (kind == "cut" and whole[len(blob) :].startswith(delta.MAGIC))
    assert (got[m.nbytes :] == 0xAB).all()


def row(start: int, elements: int, changes: int, index: bytes, values: bytes) -> bytes:
    table = np.array([(start, elements, changes, len(index), len(values), 2, 0)], delta.ROW)
    return delta.MAGIC + np.uint64(1).tobytes() + table.tobytes() + index + values


GOOD = row(0, 10, 1, b"\x09", b"\7\7")


@pytest.mark.parametrize(
    "blob",
    [
        b"other",
        delta.MAGIC,
        delta.MAGIC + np.uint64(2**63).tobytes(),
        row(20, 1, 1, b"\0", b"\0\0"),  # after the weights
        row(2**63, 1, 1, b"\0", b"\0\0"),
        row(1, 1, 1, b"\0", b"\0\0"),  # not at an element
        row(0, 11, 1, b"\0", b"\0\0"),  # 11 of 10 elements
        row(0, 10, 1, b"\x0a", b"\0\0"),  # element 11 of 10
        row(0, 10, 2, b"\x09\x00", b"\0\0\0\0"),  # the second change is element 11
        row(0, 10, 2, b"\x01", b"\0\0\0\0"),  # one position for two values
        row(0, 10, 1, b"\x09", b"\0"),  # half a value
        row(0, 10, 1, b"\x09", b"\0\0\0\0"),
        GOOD.replace(bytes([2, 0]), bytes([3, 0]), 1),  # elements of three bytes
        GOOD.replace(bytes([2, 0]), bytes([2, 1]), 1),  # packed, but it is not
        GOOD + b"x",
        GOOD + row(0, 10, 1, b"\x0a", b"\0\0"),  # the second part
    ],
)
def test_inconsistent_blob_is_refused(blob: bytes) -> None:
    m, got = described(("bfloat16", 10)), np.arange(20, dtype=np.uint8)
    with pytest.raises(WindfallError, match="weight delta"):
        delta.apply(got, blob, m)
    assert (got == np.arange(20)).all()
    delta.apply(got, GOOD, m)
    assert got[18:].tolist() == [7, 7]


@pytest.mark.parametrize("starts", [(64, 0), (0, 0), (0, 66), (0, 18)])
def test_unordered_overlapping_or_unknown_spans_are_refused(starts: tuple[int, int]) -> None:
    m = described(("bfloat16", 10), ("bfloat16", 10))
    got = np.arange(m.nbytes, dtype=np.uint8)
    table = np.array([(start, 10, 1, 1, 2, 2, 0) for start in starts], delta.ROW)
    blob = delta.MAGIC + np.uint64(2).tobytes() + table.tobytes() + b"\0\0" + b"\xff\xff\xff\xff"
    with pytest.raises(WindfallError, match="not in order"):
        delta.apply(got, blob, m)
    assert (got == np.arange(m.nbytes)).all()


def test_packed_delta_is_smaller() -> None:
    """Training changes most elements by one step of their dtype."""
    m, rng = described(("bfloat16", 400_000)), np.random.default_rng(0)
    old = random_bytes(m, rng)
    new = old.copy()
    words = new.view("<u2")
    where = rng.random(len(words)) < 0.05
    words[where] += rng.choice(np.array([1, 1, 1, 65535, 65535, 2], np.uint16), int(where.sum()))
    plain, packed = (encode(old, new, m, pack=pack) or b"" for pack in (False, True))
    assert len(packed) < 0.45 * len(plain)
    for blob in (plain, packed):
        got = old.copy()
        delta.apply(got, blob, m)
        assert (got == new).all()


def test_packed_span_that_expands_too_far_is_refused() -> None:
    m, got = described(("bfloat16", 10)), np.zeros(20, np.uint8)
    bomb = zlib.compress(bytes(100_000_000), 9)
    for index, values in ((bomb, zlib.compress(b"\0\0")), (zlib.compress(b"\0"), bomb)):
        table = np.array([(0, 10, 1, len(index), len(values), 2, 1)], delta.ROW)
        with pytest.raises(WindfallError, match="too large"):
            delta.apply(got, delta.MAGIC + np.uint64(1).tobytes() + table.tobytes() + index + values, m)
