"""The manifest of a version of the weights: its tensors, their byte ranges, and a checksum of every chunk.

Rules of a manifest, which `decode` checks before the manifest is used:

- a tensor starts at a multiple of 64 bytes, ends inside the buffer, and its size matches its dtype and shape;
- two entries share all of their bytes (tied tensors: one range, several names) or none;
- the buffer is split into chunks at every multiple of `chunk_bytes`; each chunk has one xxh3_64 checksum;
- the digest covers layout and chunk checksums but not the version: same bytes, same digest.

Weights that several machines hold have two more rules:

- `sources` says which server has which bytes; the buffer is also split where one source ends and the next begins. Every
  chunk therefore comes from one server, and its checksum is computed on the machine that has its bytes;
- `sources` and `servers` are not in the digest. A wrong source gives wrong bytes, and these fail their checksum.

The tensors of an adapter apply to other weights, with digest `base`, and are added to them times `scale`. Both are in
the digest, but only if they are set, so the digest of weights without an adapter does not depend on them.

The checksums detect damage, not forgery: a puller receives the digest over a link that it trusts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
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

    def bounds(self) -> list[int]:
        """Chunk `i` has the bytes from `bounds[i]` to `bounds[i + 1]`."""
        return chunk_bounds(self.nbytes, self.chunk_bytes)

    def chunk_servers(self) -> list[int]:
        """The number of the server that has each chunk."""
        return [0] * len(self.chunks)


class Manifest(ChunkedManifest, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    version: int
    entries: tuple[TensorEntry, ...]
    base: str = ""  # digest of the weights that these tensors are an adapter of
    scale: float = 1.0  # factor of the adapter
    servers: tuple[str, ...] = ()  # addresses; "", or no server at all: the one that the manifest came from
    sources: tuple[tuple[int, int], ...] = ()  # (first byte, number of its server), up to the next one

    def bounds(self) -> list[int]:
        return chunk_bounds(self.nbytes, self.chunk_bytes, (start for start, _ in self.sources))

    def chunk_servers(self) -> list[int]:
        starts = [start for start, _ in self.sources]
        return [self.sources[bisect_right(starts, at) - 1][1] if starts else 0 for at in self.bounds()[:-1]]

    def ranges(self) -> list[TensorEntry]:
        return byte_ranges(self.entries)


class DeltaManifest(ChunkedManifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The manifest of a delta: a blob that turns the weights with digest `base` into those with `digest`."""

    base: str


T = TypeVar("T", Manifest, DeltaManifest)


def make(**fields: Any) -> Manifest:
    """Build a manifest with its digest, and check it like a received one."""
    manifest = Manifest(**fields, digest="")
    manifest = msgspec.structs.replace(manifest, digest=digest_of(manifest))
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


def byte_ranges(entries: tuple[TensorEntry, ...]) -> list[TensorEntry]:
    """One entry for each byte range, in order. Tied tensors are included once, by their first name."""
    return sorted({e.offset: e for e in reversed(entries) if e.nbytes}.values(), key=lambda e: e.offset)


def chunk_bounds(nbytes: int, chunk_bytes: int, cuts: Iterable[int] = ()) -> list[int]:
    """
    >>> chunk_bounds(250, 100), chunk_bounds(250, 100, [0, 130])
    ([0, 100, 200, 250], [0, 100, 130, 200, 250])
    """
    return sorted({*range(0, nbytes, chunk_bytes), *cuts, nbytes})


def width(dtype: str, name: str) -> int:
    if dtype not in WIDTHS:
        raise _invalid(f"tensor {name!r} has unknown dtype {dtype!r}", f"Expected one of: {', '.join(WIDTHS)}.")
    return WIDTHS[dtype]


def digest_of(m: Manifest) -> str:
    covered: tuple[Any, ...] = (m.entries, m.nbytes, m.chunk_bytes, m.chunks)
    if m.base or m.scale != 1.0:
        covered += (m.base, m.scale)
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(covered))


def _check(m: Manifest | DeltaManifest) -> None:
    if not 0 <= m.nbytes <= MAX_BYTES or not MIN_CHUNK_BYTES <= m.chunk_bytes <= MAX_CHUNK_BYTES:
        raise _invalid(f"invalid size: {m.nbytes} bytes in chunks of {m.chunk_bytes}")
    cuts = len(m.sources) if isinstance(m, Manifest) else 0
    near = 0 <= len(m.chunks) - -(-m.nbytes // m.chunk_bytes) <= cuts  # first, because `bounds` allocates a list
    if isinstance(m, Manifest):
        _check_sources(m)
    if not near or len(m.chunks) != len(m.bounds()) - 1 or not all(0 <= c < 1 << 64 for c in m.chunks):
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
    if (m.base and (len(m.base) != 32 or set(m.base) - set("0123456789abcdef"))) or not math.isfinite(m.scale):
        raise _invalid(f"an adapter of {m.base!r} with scale {m.scale:g}")
    if m.digest != digest_of(m):
        raise _invalid("the digest does not match the content")


def _check_sources(m: Manifest) -> None:
    if bool(m.sources) != bool(m.servers):
        raise _invalid(f"{len(m.sources)} sources on {len(m.servers)} servers")
    end = -1
    for start, server in m.sources:
        if not end < start < m.nbytes or (end < 0) != (start == 0) or not 0 <= server < len(m.servers):
            raise _invalid(f"the source at byte {start} on server {server} is not in order, or not part of the weights")
        end = start


def _invalid(what: str, fix: str = "Install the same version of windfall on trainer and worker.") -> WindfallError:
    return WindfallError(what, where="weight manifest", fix=fix)
