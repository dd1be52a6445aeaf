"""The delta from one version of the weights to the next: index and new value of every element that changed.

Elements are compared as unsigned integers of their width, so NaN payloads and -0.0 are preserved. Both versions have
the same layout. Every tensor is split into blocks of 65,536 elements; blocks without a change are left out. The index
of a block uses the shortest of four encodings:

    ALL        no index: the values of the whole block follow
    BITMAP     one bit per element
    GAPS       one byte per change: unchanged elements before it; 255 means 255 unchanged elements and no change yet
    POSITIONS  two bytes per change: its position in the block

Blob: magic, number of blocks; a table with a row per block (number, changes, index bytes, encoding); indices; values.
`apply` checks every row and every index before it writes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.weights.manifest import WIDTHS, Manifest

BLOCK = 1 << 16
ALL, BITMAP, GAPS, POSITIONS = range(4)
MAGIC = b"wfdelta1"
ROW = np.dtype([("block", "<u4"), ("changes", "<u4"), ("index_bytes", "<u4"), ("encoding", "u1")])
SAMPLED = 64  # blocks encoded first, if there are many, to give up early on a step that changed nearly everything
Part = tuple[Any, list[Any], list[Any]]  # encoded blocks: rows of the table; indices and values as bytes or arrays


class ByteSpan(NamedTuple):
    """A block: bytes from `start` to `stop` of the buffer, with elements of `width` bytes."""

    start: int
    stop: int
    width: int


def spans(manifest: Manifest) -> list[ByteSpan]:
    out = []
    for e in manifest.ranges():
        width = WIDTHS[e.dtype]
        end = e.offset + e.nbytes
        out += [ByteSpan(a, min(a + BLOCK * width, end), width) for a in range(e.offset, end, BLOCK * width)]
    return out


def encode(
    old: Any, new: Any, manifest: Manifest, *, max_ratio: float = 0.9, map_: Callable[..., Iterable[Part]] = map
) -> bytes | None:
    """The blob that turns `old` into `new`, or None if it would exceed `max_ratio` of the full copy.

    `map_` may be the map of a thread pool: numpy releases the GIL while it compares.
    """
    before, after, blocks = _flat(old, manifest), _flat(new, manifest), spans(manifest)
    sample = sample_blocks(len(blocks))
    if sample is not None:
        nbytes = sum(blocks[i].stop - blocks[i].start for i in sample)
        if not worthwhile([_part(before, after, blocks, sample)], nbytes, max_ratio):
            return None
    runs = [range(i, min(i + 64, len(blocks))) for i in range(0, len(blocks), 64)]
    pieces = join(list(map_(lambda run: _part(before, after, blocks, run), runs)), manifest.nbytes, max_ratio)
    return None if pieces is None else b"".join(pieces)


def sample_blocks(blocks: int) -> range | None:
    """The blocks to encode first; None if `blocks` is too small for a sample."""
    return range(0, blocks, blocks // SAMPLED) if blocks > 4 * SAMPLED else None


def worthwhile(parts: list[Part], nbytes: int, max_ratio: float) -> bool:
    """Whether the delta of some blocks is at most `max_ratio` of their `nbytes`."""
    size = sum(len(rows) * ROW.itemsize + sum(map(len, index + values)) for rows, index, values in parts)
    return size <= max_ratio * nbytes


def join(parts: list[Part], nbytes: int, max_ratio: float) -> list[Any] | None:
    """The blob for a version of `nbytes`, as consecutive pieces; None if it would exceed `max_ratio` of the version."""
    if not worthwhile(parts, nbytes, max_ratio):
        return None
    table = np.concatenate([np.array(rows, ROW) for rows, _, _ in parts] or [np.empty(0, ROW)])
    head = MAGIC + np.uint64(len(table)).tobytes() + table.tobytes()
    return [head, *(i for _, index, _ in parts for i in index), *(v for _, _, vs in parts for v in vs)]


def apply(buffer: Any, blob: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """Write the changes into `buffer`. An invalid blob is refused before the buffer is changed."""
    flat, data, blocks = _flat(buffer, manifest), np.asarray(memoryview(blob)), spans(manifest)
    rows, at = _table(data, blocks)
    indices = []
    for block, changes, index_bytes, encoding in rows:
        start, stop, width = blocks[block]
        indices.append(data[at : at + index_bytes])
        at += index_bytes
        _check_index(encoding, changes, indices[-1], (stop - start) // width)
    for (block, changes, _, encoding), index in zip(rows, indices, strict=True):
        start, stop, width = blocks[block]
        values = data[at : at + changes * width].view(f"<u{width}")
        at += changes * width
        target = flat[start:stop].view(f"<u{width}")
        target[_positions(encoding, index, len(target))] = values


def _part(old: np.ndarray, new: np.ndarray, blocks: list[ByteSpan], which: Iterable[int]) -> Part:
    rows, indices, values = [], [], []
    for i in which:
        span = blocks[i]
        kind = f"<u{span.width}"
        after = new[span.start : span.stop].view(kind)
        changed = old[span.start : span.stop].view(kind) != after
        count = int(np.count_nonzero(changed))
        if count:
            encoding, index = _index(changed, count, span.width)
            rows.append((i, len(after) if encoding == ALL else count, len(index), encoding))
            indices.append(index)
            values.append((after if encoding == ALL else after[changed]).tobytes())
    return rows, indices, values


def _index(changed: np.ndarray, count: int, width: int) -> tuple[int, bytes]:
    """The shortest encoding and its index. The cost of ALL includes the unchanged values that it contains."""
    size = len(changed)
    bitmap = -(-size // 8)
    if (size - count) * width <= min(bitmap, count):
        return ALL, b""
    if count < bitmap:  # otherwise one byte or more per change cannot be shorter than the bitmap
        positions = np.flatnonzero(changed)
        skips, rest = np.divmod(np.diff(positions, prepend=-1) - 1, 255)
        length = count + int(skips.sum())
        if length <= min(2 * count, bitmap):
            out = np.full(length, 255, np.uint8)
            out[np.cumsum(skips + 1) - 1] = rest
            return GAPS, out.tobytes()
        if 2 * count < bitmap:
            return POSITIONS, positions.astype("<u2").tobytes()
    return BITMAP, np.packbits(changed, bitorder="little").tobytes()


def choose_encodings(
    sizes: np.ndarray, counts: np.ndarray, skips: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """The decision of `_index` for many blocks at once: the encoding of each, and the bytes of its index. `skips` is
    the number of 255 bytes that GAPS would need in addition to one byte per change."""
    bitmap = -(-sizes // 8)
    length = counts + skips
    chosen = np.where(length <= np.minimum(2 * counts, bitmap), GAPS, np.where(2 * counts < bitmap, POSITIONS, BITMAP))
    chosen = np.where(counts >= bitmap, BITMAP, chosen)
    chosen = np.where((sizes - counts) * width <= np.minimum(bitmap, counts), ALL, chosen)
    nbytes = np.choose(chosen, (np.zeros_like(counts), bitmap, length, 2 * counts))
    return chosen, np.where(counts > 0, nbytes, 0)


def _positions(encoding: int, index: np.ndarray, size: int) -> Any:
    if encoding == ALL:
        return slice(None)
    if encoding == BITMAP:
        return np.unpackbits(index, count=size, bitorder="little").view(np.bool_)
    if encoding == POSITIONS:
        return index.view("<u2")
    return (np.cumsum(index + (index != 255), dtype=np.int64) - 1)[index != 255]


def _table(data: np.ndarray, blocks: list[ByteSpan]) -> tuple[list[tuple[int, int, int, int]], int]:
    """The rows of the table, and where the indices start."""
    head = len(MAGIC) + 8
    if len(data) < head or data[: len(MAGIC)].tobytes() != MAGIC:
        raise _invalid("it does not start with the magic bytes")
    rows = int(data[len(MAGIC) : head].view("<u8")[0])
    start = head + rows * ROW.itemsize
    if rows > len(blocks) or start > len(data):
        raise _invalid(f"{rows} blocks in {len(data)} bytes, for weights with {len(blocks)} blocks")
    table = data[head:start].view(ROW)
    numbers = table["block"].astype(np.int64)
    if rows and (numbers[-1] >= len(blocks) or (np.diff(numbers) <= 0).any()):
        raise _invalid("its blocks are not in order, or not part of the weights")
    widths = np.array([s.width for s in blocks], dtype=np.int64)[numbers]
    sizes = start + table["index_bytes"].sum(dtype=np.int64) + (table["changes"] * widths).sum(dtype=np.int64)
    if sizes != len(data):
        raise _invalid(f"its table describes {sizes} bytes, but it has {len(data)}")
    return table.tolist(), start


def _check_index(encoding: int, changes: int, index: np.ndarray, size: int) -> None:
    if encoding == ALL:
        fits = len(index) == 0 and changes == size
    elif encoding == BITMAP:
        fits = len(index) * 8 in range(size, size + 8) and int(np.bitwise_count(index).sum(dtype=np.int64)) == changes
        fits = fits and (size % 8 == 0 or int(index[-1]) >> size % 8 == 0)
    elif encoding == GAPS:
        last = int(index.sum(dtype=np.int64)) + int(np.count_nonzero(index != 255))
        fits = np.count_nonzero(index != 255) == changes and last <= size
    elif encoding == POSITIONS and len(index) == 2 * changes:
        positions = index.view("<u2").astype(np.int64)
        fits = changes > 0 and int(positions[-1]) < size and bool((np.diff(positions) > 0).all())
    else:
        fits = False
    if not fits:
        raise _invalid("the index of a block does not match the block")


def _flat(buffer: Any, manifest: Manifest) -> np.ndarray:
    flat = np.frombuffer(buffer, np.uint8)
    if len(flat) < manifest.nbytes:
        raise _invalid(f"the buffer has {len(flat)} bytes, the weights {manifest.nbytes}")
    return flat


def _invalid(what: str) -> WindfallError:
    return WindfallError(what, where="weight delta", fix="Pull the full copy instead.")
