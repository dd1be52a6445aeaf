"""The delta from one version of the weights to the next: position and new value of every element that changed.

Elements are compared as unsigned integers of their width, so NaN payloads and -0.0 are preserved. Both versions have
the same layout. A span is a range of the buffer, whatever tensors it has, in elements of one width. Its index has one
byte for every change: the number of unchanged elements before it. The byte 255 means 255 unchanged elements and no
change yet. Spans without a change are left out.

A blob is one or more parts, each with magic, number of spans, a table with a row per span, indices, and values. A
process that holds some rows makes a part for them (row_writer.py); the parts of all ranks follow each other. `apply`
checks every row and every index before it writes a byte.

A packed span has differences instead of new values, modulo the width: most are 1 or -1 in training. Index and values
are compressed, the values byte plane by byte plane. It is a third of the size, but takes time at both ends, and must be
applied to exactly the bytes that it was made from.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.weights.manifest import Manifest

SKIP = 255
MAGIC = b"wfdelta5"
HEAD_BYTES = len(MAGIC) + 8
ROW = np.dtype(
    [
        ("start", "<u8"),  # first byte in the buffer of the weights
        ("elements", "<u4"),
        ("changes", "<u4"),
        ("index_bytes", "<u4"),
        ("value_bytes", "<u4"),
        ("width", "u1"),  # bytes of an element
        ("packed", "u1"),
    ]
)
"""A span."""
MAX_RATIO = 0.9  # a delta is at most this share of the full copy
MAX_DELTAS = 8  # that are kept to be read
ZLIB_LEVEL = 1

Run = Callable[..., Iterable[Any]]


class SpanDelta(NamedTuple):
    """The changes in one span."""

    start: int
    elements: int
    index: np.ndarray
    values: np.ndarray  # new values, or differences to be packed


def part(spans: list[SpanDelta], pack: bool = False, run: Run = map) -> list[memoryview]:
    """The bytes of a part of a blob. `pack`: the values are differences, and are compressed. `run`: `map`, or that of
    an executor."""
    changed = [span for span in spans if len(span.values)]
    indices: list[Any] = [span.index for span in changed]
    values: list[Any] = [span.values for span in changed]
    if pack:
        indices, values = list(run(_compress, indices)), list(run(_compress, map(_planes, values)))
    data = [memoryview(each).cast("B") for each in (*indices, *values)]
    rows = [
        (span.start, span.elements, len(span.values), len(index), len(value), span.values.itemsize, pack)
        for span, index, value in zip(changed, data[: len(changed)], data[len(changed) :], strict=True)
    ]
    head = MAGIC + np.uint64(len(rows)).tobytes() + np.array(rows, ROW).tobytes()
    return [memoryview(head), *data]


def apply(buffer: Any, blob: bytes | bytearray | memoryview, manifest: Manifest, run: Run = map) -> None:
    """Write the changes into `buffer`. An invalid blob is refused before the buffer is changed. `run`: see `part`."""
    flat, data, at = np.frombuffer(buffer, np.uint8), np.asarray(memoryview(blob)), 0
    if len(flat) < manifest.nbytes:
        raise _invalid(f"the buffer has {len(flat)} bytes, the weights {manifest.nbytes}")
    found: list[tuple[Any, np.ndarray, np.ndarray]] = []
    while at < len(data):
        table, at = _table(data, at, manifest.nbytes)
        pieces = []
        for nbytes in (*table["index_bytes"].tolist(), *table["value_bytes"].tolist()):
            pieces.append(data[at : at + nbytes])
            at += nbytes
        found += zip(table, pieces[: len(table)], pieces[len(table) :], strict=True)

    def write(span: tuple[Any, np.ndarray, np.ndarray]) -> None:
        row, index, values = span
        start, width = int(row["start"]), int(row["width"])
        target = flat[start : start + int(row["elements"]) * width].view(f"<u{width}")
        is_change = index != SKIP
        positions = (np.cumsum(index + is_change, dtype=np.int64) - 1)[is_change]
        target[positions] = target[positions] + values if row["packed"] else values

    spans = list(run(_unpack, found))  # all are valid
    list(run(write, spans))


def _table(data: np.ndarray, at: int, nbytes: int) -> tuple[np.ndarray, int]:
    """The table of the part at byte `at`, and where the indices start. `nbytes`: of the weights."""
    head = at + HEAD_BYTES
    if len(data) < head or data[at : at + len(MAGIC)].tobytes() != MAGIC:
        raise _invalid("a part does not start with the magic bytes")
    count = int(data[at + len(MAGIC) : head].view("<u8")[0])
    if count > (len(data) - head) // ROW.itemsize:
        raise _invalid(f"{count} spans in {len(data)} bytes")
    start = head + count * ROW.itemsize
    table = data[head:start].view(ROW)
    if not np.isin(table["width"], (1, 2, 4, 8)).all() or (table["start"] > nbytes).any():
        raise _invalid("a span is not part of the weights")
    firsts, widths = table["start"].astype(np.int64), table["width"].astype(np.int64)
    stops = firsts + table["elements"] * widths
    if (firsts % widths).any() or (stops > nbytes).any() or (firsts[1:] < stops[:-1]).any():
        raise _invalid("its spans are not in order, or not part of the weights")
    described = int(table["index_bytes"].sum(dtype=np.int64) + table["value_bytes"].sum(dtype=np.int64))
    if start + described > len(data):
        raise _invalid(f"its table describes {described} bytes, but it has {len(data) - start}")
    return table, start


def _unpack(span: tuple[Any, np.ndarray, np.ndarray]) -> tuple[Any, np.ndarray, np.ndarray]:
    """The index and the values of a span, checked."""
    row, index, values = span
    elements, changes, width = int(row["elements"]), int(row["changes"]), int(row["width"])
    if row["packed"]:
        index = _decompress(index, changes + elements // SKIP)
        planes = _decompress(values, changes * width)
        values = planes.reshape(width, -1).T.ravel() if len(planes) == changes * width else planes
    if len(values) != changes * width:
        raise _invalid("a span has more or fewer values than changes")
    found = int(np.count_nonzero(index != SKIP))
    if found != changes or int(index.sum(dtype=np.int64)) + found > elements:
        raise _invalid("the index of a span does not match the span")
    return row, index, values.view(f"<u{width}")


def _planes(values: np.ndarray) -> np.ndarray:
    """All first bytes, then all second bytes, and so on."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), -1).T)


def _compress(data: np.ndarray) -> bytes:
    return zlib.compress(data.data, ZLIB_LEVEL)


def _decompress(data: np.ndarray, at_most: int) -> np.ndarray:
    expand = zlib.decompressobj()
    try:
        out = expand.decompress(data.data, at_most + 1)
    except zlib.error as e:
        raise _invalid(f"a span cannot be decompressed: {e}") from e
    if len(out) > at_most:
        raise _invalid("a span is too large")
    return np.frombuffer(out, np.uint8)


def _invalid(what: str) -> WindfallError:
    return WindfallError(what, where="weight delta", fix="Pull the full copy instead.")
