"""The manifest of a version of the weights: its tensors, their byte ranges, and a checksum of every chunk.

Rules of a manifest, which `decode` checks before the manifest is used:

- a tensor starts at a multiple of 64 bytes, ends inside the buffer, and its size matches its dtype and shape;
- two entries share all of their bytes (tied tensors: one range, several names) or none;
- the buffer is split into chunks of `chunk_bytes`, the last one may be shorter; each has one xxh3_64 checksum;
- the digest covers layout and chunk checksums but not the version: same bytes, same digest.

The checksums detect damage, not forgery: a puller receives the digest over a link that it trusts.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
import xxhash

from windfall.errors import WindfallError

ALIGN_BYTES = 64
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 64, 1 << 30
MAX_BYTES = 1 << 44  # 16 TiB. No model is larger, so a larger number is an error.
MAX_ENTRIES = 1 << 20
MAX_MANIFEST_BYTES = 128 << 20  # Enough for a million tensors. A larger answer is refused.
WIDTHS = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2,
    "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip
"""Bytes per element, by torch name of the dtype."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # first byte in the buffer
    nbytes: int


class ChunkedManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nbytes: int
    chunk_bytes: int
    chunks: tuple[int, ...]  # xxh3_64 of each chunk
    digest: str  # hexadecimal xxh3_128 of layout and chunk checksums

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


class Manifest(ChunkedManifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    entries: tuple[TensorEntry, ...]

    def ranges(self) -> list[TensorEntry]:
        """One entry for each byte range, in order. Tied tensors are included once, by their first name."""
        return sorted({e.offset: e for e in reversed(self.entries) if e.nbytes}.values(), key=lambda e: e.offset)


class DeltaManifest(ChunkedManifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of a delta: a blob that turns the weights with digest `base` into those with `digest`."""

    base: str


T = TypeVar("T", Manifest, DeltaManifest)


def make(
    *, version: int, entries: tuple[TensorEntry, ...], nbytes: int, chunk_bytes: int, chunks: tuple[int, ...]
) -> Manifest:
    """Build a manifest with its digest, and check it like a received one."""
    digest = _digest(entries, nbytes, chunk_bytes, chunks)
    manifest = Manifest(
        version=version, nbytes=nbytes, chunk_bytes=chunk_bytes, entries=entries, chunks=chunks, digest=digest
    )
    _check(manifest)
    return manifest


def decode(data: bytes, kind: type[T]) -> T:
    """Decode a manifest of this kind. Raises WindfallError if it violates a rule."""
    try:
        manifest = msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as e:
        raise _invalid(f"cannot be decoded: {e}") from e
    _check(manifest)
    return manifest


def layout(tensors: list[tuple[str, str, tuple[int, ...], int]]) -> tuple[tuple[TensorEntry, ...], int]:
    """Entries and size of the buffer for rows of (name, dtype, shape, storage). Tensors with equal `storage` are tied.

    >>> entries, nbytes = layout([("a", "float32", (3,), 0), ("b", "int8", (2, 2), 1), ("tied", "float32", (3,), 0)])
    >>> [(e.name, e.offset, e.nbytes) for e in entries], nbytes
    ([('a', 0, 12), ('b', 64, 4), ('tied', 0, 12)], 68)
    """
    entries, placed, end = [], {}, 0
    for name, dtype, shape, storage in tensors:
        nbytes = width(dtype, name) * math.prod(shape)
        if storage not in placed:
            placed[storage] = -(-end // ALIGN_BYTES) * ALIGN_BYTES if nbytes else 0
            end = max(end, placed[storage] + nbytes)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=shape, offset=placed[storage], nbytes=nbytes))
    return tuple(entries), end


def width(dtype: str, name: str) -> int:
    if dtype not in WIDTHS:
        raise _invalid(f"tensor {name!r} has unknown dtype {dtype!r}", f"Expected one of: {', '.join(WIDTHS)}.")
    return WIDTHS[dtype]


def _digest(entries: tuple[TensorEntry, ...], nbytes: int, chunk_bytes: int, chunks: tuple[int, ...]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode((entries, nbytes, chunk_bytes, chunks)))


def _check(m: Manifest | DeltaManifest) -> None:
    if not 0 <= m.nbytes <= MAX_BYTES or not MIN_CHUNK_BYTES <= m.chunk_bytes <= MAX_CHUNK_BYTES:
        raise _invalid(f"invalid size: {m.nbytes} bytes in chunks of {m.chunk_bytes}")
    if len(m.chunks) != -(-m.nbytes // m.chunk_bytes) or not all(0 <= c < 1 << 64 for c in m.chunks):
        raise _invalid(f"{len(m.chunks)} checksums for {m.nbytes} bytes in chunks of {m.chunk_bytes}")
    if isinstance(m, DeltaManifest):
        return
    if m.version < 0:
        raise _invalid(f"version {m.version} is negative")
    if len(m.entries) > MAX_ENTRIES or len({e.name for e in m.entries}) != len(m.entries):
        raise _invalid(f"{len(m.entries)} tensors: too many, or several with the same name")
    for e in m.entries:
        if any(n < 0 or n > MAX_BYTES for n in e.shape) or e.nbytes != width(e.dtype, e.name) * math.prod(e.shape):
            raise _invalid(f"tensor {e.name!r}: {e.nbytes} bytes do not match {e.dtype} {list(e.shape)}")
        if e.offset < 0 or e.offset % ALIGN_BYTES or e.offset + e.nbytes > m.nbytes:
            raise _invalid(f"tensor {e.name!r} at {e.offset} is not aligned or not inside {m.nbytes} bytes")
    seen: dict[int, Any] = {}
    for e in m.entries:
        if e.nbytes and seen.setdefault(e.offset, (e.dtype, e.shape)) != (e.dtype, e.shape):
            raise _invalid(f"tensor {e.name!r} overlaps another one")
    end = 0
    for e in m.ranges():
        if e.offset < end:
            raise _invalid(f"tensor {e.name!r} overlaps another one")
        end = e.offset + e.nbytes
    if end != m.nbytes:
        raise _invalid(f"the tensors end at byte {end}, the buffer at {m.nbytes}")
    if m.digest != _digest(m.entries, m.nbytes, m.chunk_bytes, m.chunks):
        raise _invalid("the digest does not match the content")


def _invalid(what: str, fix: str = "Install the same version of windfall on trainer and worker.") -> WindfallError:
    return WindfallError(what, where="weight manifest", fix=fix)
