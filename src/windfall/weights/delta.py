"""The delta from one version of the weights to the next: position and new value of every element that changed.

Elements are compared as unsigned integers of their width, so NaN payloads and -0.0 are preserved. Both versions have
the same layout. Tensors are split into blocks; blocks without a change are left out. The index of a block uses the
shorter of two encodings:

    BITMAP     one bit per element
    GAPS       one byte per change: unchanged elements before it; 255 means 255 unchanged elements and no change yet

A blob is one or more parts, each with magic, number of blocks, a table with a row per block, indices, and values.
Whoever holds some rows makes parts for them (delta_encoder.py), and parts of several ranks are simply put one after
another. If the weights are spread over several machines, each machine has a blob of its own, and all are applied.
`apply` checks every row and every index before it writes a byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.weights.manifest import WIDTHS, Manifest

BITMAP, GAPS = range(2)
MAGIC = b"wfdelta3"
HEAD_BYTES = len(MAGIC) + 8
ROW = np.dtype([("start", "<u8"), ("elements", "<u4"), ("changes", "<u4"), ("index_bytes", "<u4"), ("encoding", "u1")])
"""A block: its first byte in the buffer of the weights, and its number of elements, none of them of another tensor."""
MAX_RATIO = 0.9  # a delta is at most this share of the full copy


class DeltaPart(NamedTuple):
    """Blocks of a blob, with their indices and values in the order of the rows."""

    rows: np.ndarray
    index: Any  # bytes, or an array of them
    values: Any

    def buffers(self) -> list[memoryview]:
        """The bytes of this part."""
        head = MAGIC + np.uint64(len(self.rows)).tobytes() + self.rows.tobytes()
        return [memoryview(data) for data in (head, self.index, self.values)]


def choose_encodings(sizes: np.ndarray, counts: np.ndarray, skips: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shorter encoding of every block, and the bytes of its index. `skips` is the number of 255 bytes that GAPS
    would need in addition to one byte per change."""
    bitmap, gaps = -(-sizes // 8), counts + skips
    chosen = np.where(gaps <= bitmap, GAPS, BITMAP)
    return chosen, np.where(counts > 0, np.minimum(gaps, bitmap), 0)


def apply(buffer: Any, blob: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """Write the changes into `buffer`. An invalid blob is refused before the buffer is changed."""
    flat, data, at = np.frombuffer(buffer, np.uint8), np.asarray(memoryview(blob)), 0
    if len(flat) < manifest.nbytes:
        raise _invalid(f"the buffer has {len(flat)} bytes, the weights {manifest.nbytes}")
    writes: list[tuple[np.ndarray, int, np.ndarray, np.ndarray]] = []
    while at < len(data):
        table, widths, at = _table(data, at, manifest)
        indices = []
        for row in table:
            indices.append(data[at : at + int(row["index_bytes"])])
            at += len(indices[-1])
            _check_index(row, indices[-1])
        for row, width, index in zip(table, widths.tolist(), indices, strict=True):
            start, stop, nbytes = int(row["start"]), int(row["elements"]) * width, int(row["changes"]) * width
            target = flat[start : start + stop].view(f"<u{width}")
            writes.append((target, int(row["encoding"]), index, data[at : at + nbytes].view(f"<u{width}")))
            at += nbytes
    for target, encoding, index, values in writes:
        target[_positions(encoding, index, len(target))] = values


def _table(data: np.ndarray, at: int, manifest: Manifest) -> tuple[np.ndarray, np.ndarray, int]:
    """The table of the part at byte `at`, the width of the elements of each block, and where the indices start."""
    head = at + HEAD_BYTES
    if len(data) < head or data[at : at + len(MAGIC)].tobytes() != MAGIC:
        raise _invalid("a part does not start with the magic bytes")
    count = int(data[at + len(MAGIC) : head].view("<u8")[0])
    if count > (len(data) - head) // ROW.itemsize:
        raise _invalid(f"{count} blocks in {len(data)} bytes")
    start = head + count * ROW.itemsize
    table, ranges = data[head:start].view(ROW), manifest.ranges()
    if not count:
        return table, np.empty(0, np.int64), start
    if not ranges or not ranges[0].offset <= int(table["start"].min()) <= int(table["start"].max()) < manifest.nbytes:
        raise _invalid("a block is not part of the weights")
    firsts, elements = table["start"].astype(np.int64), table["elements"].astype(np.int64)
    owners = np.searchsorted([e.offset for e in ranges], firsts, "right") - 1
    offsets, ends, widths = np.array([(e.offset, e.offset + e.nbytes, WIDTHS[e.dtype]) for e in ranges])[owners].T
    stops = firsts + elements * widths
    if ((firsts - offsets) % widths).any() or (stops > ends).any() or (firsts[1:] < stops[:-1]).any():
        raise _invalid("its blocks are not in order, or not part of the weights")
    nbytes = int(table["index_bytes"].sum(dtype=np.int64) + (table["changes"] * widths).sum())
    if start + nbytes > len(data):
        raise _invalid(f"its table describes {nbytes} bytes, but it has {len(data) - start}")
    return table, widths, start


def _check_index(row: Any, index: np.ndarray) -> None:
    size, changes, encoding = int(row["elements"]), int(row["changes"]), int(row["encoding"])
    fits = False
    if encoding == BITMAP:
        fits = len(index) * 8 in range(size, size + 8) and int(np.bitwise_count(index).sum(dtype=np.int64)) == changes
        fits = fits and (size % 8 == 0 or int(index[-1]) >> size % 8 == 0)
    elif encoding == GAPS:
        found = int(np.count_nonzero(index != 255))
        fits = found == changes and int(index.sum(dtype=np.int64)) + found <= size
    if not fits:
        raise _invalid("the index of a block does not match the block")


def _positions(encoding: int, index: np.ndarray, size: int) -> Any:
    if encoding == BITMAP:
        return np.unpackbits(index, count=size, bitorder="little").view(np.bool_)
    return (np.cumsum(index + (index != 255), dtype=np.int64) - 1)[index != 255]


def _invalid(what: str) -> WindfallError:
    return WindfallError(what, where="weight delta", fix="Pull the full copy instead.")
