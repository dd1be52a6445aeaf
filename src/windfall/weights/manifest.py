"""The manifest of a file of weights: its chunks with their hashes, and what the file is.

    file           entries     before, after
    a full copy    tensors     -                the weights of a version, or the base of adapters
    an adapter     tensors     -                `base` is the full copy that it applies to, times `scale`
    a delta        -           two full copies  turns the one into the other (delta.py)

Rules of a manifest, which `decode` checks before the manifest is used:

- a tensor starts at a multiple of 64 bytes, ends inside the buffer, and its size matches its dtype and shape;
- two entries share all of their bytes (tied tensors: one range, several names) or none;
- the file is split into chunks at every multiple of `chunk_bytes`, and at `cuts`: where the bytes of one machine of the
  trainer end and those of the next begin. So the hashes of a chunk are computed on the machine that has its bytes;
- the digest names the file. It covers everything but the version: same bytes, same digest.

A reader receives the digest over a link that it trusts; the manifest and the chunks may come from anywhere. Each chunk
has two hashes: the checksum (xxh3_64) finds damage, and suffices for bytes of the trainer; the seal (BLAKE3) also
resists forgery, and costs twice the time. BLAKE3 makes the digest, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import blake3
import msgspec
import numpy as np
import xxhash

from windfall.errors import WindfallError
from windfall.link.messages import FileRef

ALIGN_BYTES = 64
MAX_CHUNK_BYTES = 1 << 30
MAX_BYTES = 1 << 44  # 16 TiB. No model is larger, so a larger number is an error.
MAX_ENTRIES = 1 << 20
MAX_CHUNKS = 1 << 14  # of a file that is published; so its manifest has less than a MB of hashes
SEAL_BYTES = 32
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


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    nbytes: int
    chunk_bytes: int
    chunks: bytes  # checksum of each chunk, 8 bytes each, little endian
    seals: bytes  # seal of each chunk
    digest: str = ""  # hexadecimal BLAKE3
    cuts: tuple[int, ...] = ()  # further chunk bounds
    version: int = -1
    entries: tuple[TensorEntry, ...] = ()
    base: str = ""
    scale: float = 1.0
    before: str = ""
    after: str = ""
    result: bytes = b""  # a delta: the manifest of `after`, because its reader may find no copy of `after`

    @property
    def ref(self) -> FileRef:
        return FileRef(digest=self.digest, nbytes=self.nbytes, before=self.before or self.base, after=self.after)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def bounds(self) -> list[int]:
        """Chunk `i` has the bytes from `bounds[i]` to `bounds[i + 1]`."""
        return chunk_bounds(self.nbytes, self.chunk_bytes, self.cuts)

    def checksums(self) -> list[int]:
        return np.frombuffer(self.chunks, "<u8").tolist()

    def is_chunk(self, i: int, data: Any, *, trusted: bool) -> bool:
        """Whether these are the bytes of chunk `i`: by its checksum if their source is trusted, otherwise by its
        seal."""
        if trusted:
            return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little") == self.chunks[8 * i : 8 * i + 8]
        return blake3.blake3(data).digest() == self.seal(i)

    def seal(self, i: int) -> bytes:
        return self.seals[SEAL_BYTES * i : SEAL_BYTES * (i + 1)]

    def ranges(self) -> list[TensorEntry]:
        return byte_ranges(self.entries)


def hash_chunk(*pieces: Any) -> tuple[bytes, bytes]:
    """Checksum and seal of a chunk, whose bytes may be in several pieces."""
    checksum, seal = xxhash.xxh3_64(), blake3.blake3()
    for data in pieces:
        checksum.update(data)
        seal.update(data)
    return checksum.intdigest().to_bytes(8, "little"), seal.digest()


def make(**fields: Any) -> Manifest:
    """Build a manifest with its digest, and check it like a received one."""
    made = Manifest(**fields)
    made = msgspec.structs.replace(made, digest=digest_of(made))
    _check(made)
    return made


def decode(data: bytes, digest: str = "") -> Manifest:
    """Decode a manifest, which must have this digest, if one is given. Raises WindfallError if it violates a rule."""
    try:
        made = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as e:
        raise _invalid(f"cannot be decoded: {e}") from e
    if digest and made.digest != digest:
        raise _invalid(f"it has digest {made.digest}, expected {digest}")
    _check(made)
    return made


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


def chunk_size(nbytes: int, wanted: int) -> int:
    """The size of the chunks of a file: as wanted, or larger if there would be more than MAX_CHUNKS.

    >>> chunk_size(100 << 20, 4 << 20) >> 20, chunk_size(140 << 30, 4 << 20) >> 20
    (4, 16)
    """
    while wanted * MAX_CHUNKS < nbytes:
        wanted *= 2
    return wanted


def digest_of(m: Manifest) -> str:
    file = (m.nbytes, m.chunk_bytes, m.cuts, m.chunks, m.seals)
    return blake3.blake3(
        msgspec.msgpack.encode((file, m.entries, m.base, m.scale, m.before, m.after, m.result))
    ).hexdigest()


def _check(m: Manifest) -> None:
    if m.digest != digest_of(m):  # first: the other checks take longer, and a forger chooses how long
        raise _invalid("the digest does not match the content")
    if not 0 <= m.nbytes <= MAX_BYTES or m.chunk_bytes % ALIGN_BYTES or not 0 < m.chunk_bytes <= MAX_CHUNK_BYTES:
        raise _invalid(f"invalid size: {m.nbytes} bytes in chunks of {m.chunk_bytes}")
    if any(not a < b for a, b in pairwise((0, *m.cuts, m.nbytes))) and m.cuts:
        raise _invalid(f"its cuts {list(m.cuts)} are not in order, or not inside {m.nbytes} bytes")
    count = len(m.chunks) // 8
    near = 0 <= count - -(-m.nbytes // m.chunk_bytes) <= len(m.cuts)  # first, because `bounds` allocates a list
    if not near or (len(m.chunks), len(m.seals)) != (8 * count, SEAL_BYTES * count) or count != len(m.bounds()) - 1:
        what = f"{len(m.chunks)} bytes of checksums and {len(m.seals)} of seals"
        raise _invalid(f"{what} for {m.nbytes} bytes in chunks of {m.chunk_bytes}")
    if any(name and not re.fullmatch("[0-9a-f]{64}", name) for name in (m.base, m.before, m.after)):
        raise _invalid(f"{m.base or m.before!r} or {m.after!r} is not a digest")
    if bool(m.before) != bool(m.after) or (m.before and (m.entries or m.base)) or not math.isfinite(m.scale):
        raise _invalid(f"neither a copy, nor an adapter, nor a delta: scale {m.scale:g}, {len(m.entries)} tensors")
    if not m.before:
        _check_entries(m)


def _check_entries(m: Manifest) -> None:
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


def _invalid(what: str, fix: str = "Install the same version of windfall on trainer and worker.") -> WindfallError:
    return WindfallError(what, where="weight manifest", fix=fix)
