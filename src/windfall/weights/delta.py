"""The delta from one version of the weights to the next: position and new value of every element that changed.

Elements are compared as unsigned integers of their width, so NaN payloads and -0.0 are preserved. Both versions have
the same layout. The index of a span (a part of one tensor) has one byte for every change: the number of unchanged
elements before it. The byte 255 means 255 unchanged elements and no change yet. Spans without a change are left out.

A blob is one or more parts, each with magic, number of spans, a table with a row per span, indices, and values.
A process that holds some rows makes a part for them (row_writer.py), and parts of several ranks are put one after
another. If the weights are spread over several machines, each machine has a blob of its own, and all are applied.
`apply` checks every row and every index before it writes a byte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.weights.manifest import WIDTHS, Manifest

SKIP = 255
MAGIC = b"wfdelta4"
HEAD_BYTES = len(MAGIC) + 8
ROW = np.dtype([("start", "<u8"), ("elements", "<u4"), ("changes", "<u4"), ("index_bytes", "<u4")])
"""A span: its first byte in the buffer of the weights, and its number of elements, none of them of another tensor."""
MAX_RATIO = 0.9  # a delta is at most this share of the full copy


class SpanDelta(NamedTuple):
    """The changes in one span."""

    start: int
    elements: int
    index: np.ndarray
    values: np.ndarray


def part(spans: list[SpanDelta]) -> list[memoryview]:
    """The bytes of a part of a blob."""
    changed = [span for span in spans if len(span.values)]
    rows = np.array([(s.start, s.elements, len(s.values), len(s.index)) for s in changed], ROW)
    head = MAGIC + np.uint64(len(rows)).tobytes() + rows.tobytes()
    data = [head, *(s.index for s in changed), *(s.values for s in changed)]
    return [memoryview(each).cast("B") for each in data]


def apply(buffer: Any, blob: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """Write the changes into `buffer`. An invalid blob is refused before the buffer is changed."""
    flat, data, at = np.frombuffer(buffer, np.uint8), np.asarray(memoryview(blob)), 0
    if len(flat) < manifest.nbytes:
        raise _invalid(f"the buffer has {len(flat)} bytes, the weights {manifest.nbytes}")
    writes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
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
            writes.append((target, index, data[at : at + nbytes].view(f"<u{width}")))
            at += nbytes
    for target, index, values in writes:
        is_change = index != SKIP
        target[(np.cumsum(index + is_change, dtype=np.int64) - 1)[is_change]] = values


def _table(data: np.ndarray, at: int, manifest: Manifest) -> tuple[np.ndarray, np.ndarray, int]:
    """The table of the part at byte `at`, the width of the elements of each span, and where the indices start."""
    head = at + HEAD_BYTES
    if len(data) < head or data[at : at + len(MAGIC)].tobytes() != MAGIC:
        raise _invalid("a part does not start with the magic bytes")
    count = int(data[at + len(MAGIC) : head].view("<u8")[0])
    if count > (len(data) - head) // ROW.itemsize:
        raise _invalid(f"{count} spans in {len(data)} bytes")
    start = head + count * ROW.itemsize
    table, ranges = data[head:start].view(ROW), manifest.ranges()
    if not count:
        return table, np.empty(0, np.int64), start
    if not ranges or not ranges[0].offset <= int(table["start"].min()) <= int(table["start"].max()) < manifest.nbytes:
        raise _invalid("a span is not part of the weights")
    firsts, elements = table["start"].astype(np.int64), table["elements"].astype(np.int64)
    owners = np.searchsorted([e.offset for e in ranges], firsts, "right") - 1
    offsets, ends, widths = np.array([(e.offset, e.offset + e.nbytes, WIDTHS[e.dtype]) for e in ranges])[owners].T
    stops = firsts + elements * widths
    if ((firsts - offsets) % widths).any() or (stops > ends).any() or (firsts[1:] < stops[:-1]).any():
        raise _invalid("its spans are not in order, or not part of the weights")
    nbytes = int(table["index_bytes"].sum(dtype=np.int64) + (table["changes"] * widths).sum())
    if start + nbytes > len(data):
        raise _invalid(f"its table describes {nbytes} bytes, but it has {len(data) - start}")
    return table, widths, start


def _check_index(row: Any, index: np.ndarray) -> None:
    changes = int(np.count_nonzero(index != SKIP))
    if changes != int(row["changes"]) or int(index.sum(dtype=np.int64)) + changes > int(row["elements"]):
        raise _invalid("the index of a span does not match the span")


def _invalid(what: str) -> WindfallError:
    return WindfallError(what, where="weight delta", fix="Pull the full copy instead.")
