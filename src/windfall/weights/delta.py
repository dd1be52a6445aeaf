"""The delta from one version of the weights to the next: index and new value of every element that changed.

Elements are compared as unsigned integers of their width, so NaN payloads and -0.0 are preserved. Both versions have
the same layout. Every tensor is split into blocks of 65,536 elements; blocks without a change are left out. The index
of a block uses the shortest of three encodings:

    BITMAP     one bit per element
    GAPS       one byte per change: unchanged elements before it; 255 means 255 unchanged elements and no change yet
    POSITIONS  two bytes per change: its position in the block

Blob: magic, number of blocks; a table with a row per block (number, changes, index bytes, encoding); indices; values.
`apply` checks every row and every index before it writes a byte.

Several processes may encode the blocks of one blob. Each has `EncodedBlocks` for the blocks that it compared, and
`arrange` computes from the tables of all where the bytes of each belong. The blob does not depend on the division.

If the two versions are spread over several machines, each machine has a blob of its own with the changes of its bytes,
and all of them are applied. A block with bytes of two machines is then in both blobs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.weights.manifest import WIDTHS, Manifest, TensorEntry

BLOCK = 1 << 16
BITMAP, GAPS, POSITIONS = range(3)
MAGIC = b"wfdelta2"
HEAD_BYTES = len(MAGIC) + 8
ROW = np.dtype([("block", "<u4"), ("changes", "<u4"), ("index_bytes", "<u4"), ("encoding", "u1")])
MAX_RATIO = 0.9  # a delta is at most this share of the full copy
RUN = 64  # blocks that are compared in one piece of work
SAMPLED = 64  # blocks encoded first, if there are many, to give up early on a step that changed nearly everything


class ByteSpan(NamedTuple):
    """A block: bytes from `start` to `stop` of the buffer, with elements of `width` bytes."""

    start: int
    stop: int
    width: int


class EncodedBlocks(NamedTuple):
    """Some encoded blocks: their rows of the table, and their indices and values in the order of the rows."""

    rows: np.ndarray
    index: Any  # bytes, or an array of them
    values: Any


class DeltaBlocks:
    """All blocks of a layout, by number."""

    def __init__(self, ranges: Sequence[TensorEntry]) -> None:
        """`ranges`: from Manifest.ranges()."""
        self.ranges = ranges
        counts = [-(-e.nbytes // (BLOCK * WIDTHS[e.dtype])) for e in ranges]
        self.firsts = list(accumulate(counts, initial=0))  # number of the first block of every range

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, number: int) -> ByteSpan:
        i = bisect_right(self.firsts, number) - 1
        entry, width = self.ranges[i], WIDTHS[self.ranges[i].dtype]
        start = entry.offset + (number - self.firsts[i]) * BLOCK * width
        return ByteSpan(start, min(start + BLOCK * width, entry.offset + entry.nbytes), width)

    def size(self, rows: np.ndarray) -> int:
        """Bytes that these rows of a table and their indices and values take in a blob."""
        return rows.nbytes + int(rows["index_bytes"].sum(dtype=np.int64) + self.value_bytes(rows).sum())

    def value_bytes(self, rows: np.ndarray) -> np.ndarray:
        widths = np.array([WIDTHS[e.dtype] for e in self.ranges], np.int64)
        owners = np.searchsorted(self.firsts, rows["block"].astype(np.int64), "right") - 1
        return rows["changes"] * widths[owners]


def sampled(numbers: range, blocks: int) -> range:
    """The blocks among `numbers`, of `blocks` in all, to encode first. None if there are too few for a sample.

    >>> sampled(range(7, 20), 300), sampled(range(7, 20), 200)
    (range(8, 20, 4), range(0, 0))
    """
    if blocks <= 4 * SAMPLED:
        return range(0)
    step = blocks // SAMPLED
    return range(-(-numbers.start // step) * step, numbers.stop, step)


def runs(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Blocks divided into pieces of work."""
    return [numbers[i : i + RUN] for i in range(0, len(numbers), RUN)]


def encode_blocks(old: np.ndarray, new: np.ndarray, blocks: DeltaBlocks, which: Iterable[int]) -> EncodedBlocks:
    """Compare some blocks of two buffers."""
    rows, indices, values = [], [], []
    for i in which:
        span = blocks[i]
        kind = f"<u{span.width}"
        after = new[span.start : span.stop].view(kind)
        changed = old[span.start : span.stop].view(kind) != after
        count = int(np.count_nonzero(changed))
        if count:
            encoding, index = _index(changed, count)
            rows.append((i, count, len(index), encoding))
            indices.append(index)
            values.append(after[changed].tobytes())
    return EncodedBlocks(np.array(rows, ROW), b"".join(indices), b"".join(values))


class BlobPlaces(NamedTuple):
    """Where the bytes of a part belong in the blob."""

    order: np.ndarray  # of every row: its position in the table of the blob
    index_at: np.ndarray
    values_at: np.ndarray
    value_bytes: np.ndarray

    def writes(self, part: EncodedBlocks) -> Iterator[tuple[int, memoryview]]:
        """Pairs (position in the blob, bytes). Neighbors in the blob are written at once."""
        if not len(self.order):
            return
        starts = np.flatnonzero(np.diff(self.order, prepend=-2) != 1)
        stops = np.append(starts[1:], len(self.order))
        for data, targets, sizes in (
            (part.index, self.index_at, part.rows["index_bytes"]),
            (part.values, self.values_at, self.value_bytes),
        ):
            ends = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
            view = memoryview(data)
            for start, stop in zip(starts, stops, strict=True):
                if ends[stop] > ends[start]:
                    yield int(targets[start]), view[int(ends[start]) : int(ends[stop])]


def arrange(tables: Sequence[np.ndarray], blocks: DeltaBlocks) -> tuple[bytes, int, list[BlobPlaces]]:
    """The start of the blob (magic, number of blocks, table), its size, and the place of every part in it."""
    joined = np.concatenate([np.empty(0, ROW), *tables])
    by_block = np.argsort(joined["block"], kind="stable")
    table, position = joined[by_block], np.empty(len(joined), np.int64)
    position[by_block] = np.arange(len(joined))
    head = MAGIC + np.uint64(len(table)).tobytes() + table.tobytes()
    index_bytes, value_bytes = table["index_bytes"].astype(np.int64), blocks.value_bytes(table)
    index_at = len(head) + np.cumsum(index_bytes) - index_bytes
    values_at = len(head) + index_bytes.sum() + np.cumsum(value_bytes) - value_bytes
    columns = [position, *(column[position] for column in (index_at, values_at, value_bytes))]
    ends = list(accumulate((len(t) for t in tables), initial=0))
    places = [BlobPlaces(*(column[start:stop] for column in columns)) for start, stop in pairwise(ends)]
    return head, len(head) + int(index_bytes.sum() + value_bytes.sum()), places


def apply(buffer: Any, blob: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """Write the changes into `buffer`. An invalid blob is refused before the buffer is changed."""
    flat, data, blocks = _flat(buffer, manifest), np.asarray(memoryview(blob)), DeltaBlocks(manifest.ranges())
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


def _index(changed: np.ndarray, count: int) -> tuple[int, bytes]:
    """The shortest encoding and its index."""
    bitmap = -(-len(changed) // 8)
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


def choose_encodings(sizes: np.ndarray, counts: np.ndarray, skips: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The decision of `_index` for many blocks at once: the encoding of each, and the bytes of its index. `skips` is
    the number of 255 bytes that GAPS would need in addition to one byte per change."""
    bitmap = -(-sizes // 8)
    length = counts + skips
    chosen = np.where(length <= np.minimum(2 * counts, bitmap), GAPS, np.where(2 * counts < bitmap, POSITIONS, BITMAP))
    chosen = np.where(counts >= bitmap, BITMAP, chosen)
    nbytes = np.choose(chosen, (bitmap, length, 2 * counts))
    return chosen, np.where(counts > 0, nbytes, 0)


def _positions(encoding: int, index: np.ndarray, size: int) -> Any:
    if encoding == BITMAP:
        return np.unpackbits(index, count=size, bitorder="little").view(np.bool_)
    if encoding == POSITIONS:
        return index.view("<u2")
    return (np.cumsum(index + (index != 255), dtype=np.int64) - 1)[index != 255]


def _table(data: np.ndarray, blocks: DeltaBlocks) -> tuple[list[tuple[int, int, int, int]], int]:
    """The rows of the table, and where the indices start."""
    head = HEAD_BYTES
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
    sizes = HEAD_BYTES + blocks.size(table)
    if sizes != len(data):
        raise _invalid(f"its table describes {sizes} bytes, but it has {len(data)}")
    return table.tolist(), start


def _check_index(encoding: int, changes: int, index: np.ndarray, size: int) -> None:
    if encoding == BITMAP:
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
