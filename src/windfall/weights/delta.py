"""The step from one version of the weights to the next: new values of the elements that changed, by index.

Elements are compared as unsigned integers of their width, so NaN payloads and -0.0 arrive as they are. The layout is
the same before and after. Every tensor is cut into blocks of 65,536 elements; a block in which nothing changed is not
in the blob. Where the changed elements of a block are is written in the shortest of four ways:

    ALL     no index: the whole block follows
    BITMAP  one bit per element
    GAPS    a byte per change: unchanged elements since the last one; 255 means 255 unchanged ones and no change yet
    PLACES  two bytes per change: its place in the block

Blob: magic, number of blocks; a table with a row per block (number, changes, index bytes, way); indices; values.
`apply` checks every row and every index before it writes a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from windfall.errors import WindfallError
from windfall.weights.manifest import WIDTHS, Manifest

BLOCK = 1 << 16
ALL, BITMAP, GAPS, PLACES = range(4)
MAGIC = b"wfdelta1"
ROW = np.dtype([("block", "<u4"), ("changes", "<u4"), ("index_bytes", "<u4"), ("way", "u1")])
SAMPLED = 64
"""Blocks looked at first, where there are many, to give up early on a step that changed nearly everything."""
Part = tuple[Any, list[Any], list[Any]]
"""Rows of the table, indices and values: in bytes, or arrays of them."""
Bytes = np.ndarray


class ByteSpan(NamedTuple):
    """A block: bytes from `start` to `stop`, elements of `width`."""

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
    old: Any, new: Any, manifest: Manifest, *, worth: float = 0.9, spread: Callable[..., Iterable[Part]] = map
) -> bytes | None:
    """The blob that turns `old` into `new`, or None when it would be more than `worth` of the full copy.

    `spread` is `map`, or the map of a pool of threads: numpy lets go of the interpreter while it compares.
    """
    before, after, blocks = _flat(old, manifest), _flat(new, manifest), spans(manifest)
    some = first_look(len(blocks))
    if some is not None:
        nbytes = sum(blocks[i].stop - blocks[i].start for i in some)
        if not worthwhile([_part(before, after, blocks, some)], nbytes, worth):
            return None
    runs = [range(i, min(i + 64, len(blocks))) for i in range(0, len(blocks), 64)]
    pieces = join(list(spread(lambda run: _part(before, after, blocks, run), runs)), manifest.nbytes, worth)
    return None if pieces is None else b"".join(pieces)


def first_look(blocks: int) -> range | None:
    """Of so many blocks those to look at first, where there are many."""
    return range(0, blocks, blocks // SAMPLED) if blocks > 4 * SAMPLED else None


def worthwhile(parts: list[Part], nbytes: int, worth: float) -> bool:
    """Whether the delta of some blocks is shorter than `worth` of what is in them."""
    return _size(parts) <= worth * nbytes


def join(parts: list[Part], nbytes: int, worth: float) -> list[Any] | None:
    """The blob of a version of `nbytes`, in pieces to be written one after the other; None where it is not worth it."""
    if not worthwhile(parts, nbytes, worth):
        return None
    table = np.concatenate([np.array(rows, ROW) for rows, _, _ in parts] or [np.empty(0, ROW)])
    head = MAGIC + np.uint64(len(table)).tobytes() + table.tobytes()
    return [head, *(i for _, index, _ in parts for i in index), *(v for _, _, vs in parts for v in vs)]


def apply(buffer: Any, blob: bytes | bytearray | memoryview, manifest: Manifest) -> None:
    """Write the changes into `buffer`. A blob that is wrong anywhere is refused with the buffer untouched."""
    flat, data, blocks = _flat(buffer, manifest), np.asarray(memoryview(blob)), spans(manifest)
    table, at = _table(data, blocks)
    indices = []
    for row in table:
        indices.append(data[at : at + int(row["index_bytes"])])
        at += int(row["index_bytes"])
        _check_index(int(row["way"]), int(row["changes"]), indices[-1], _elements(blocks[row["block"]]))
    for row, index in zip(table, indices, strict=True):
        span = blocks[row["block"]]
        values = data[at : at + int(row["changes"]) * span.width].view(f"<u{span.width}")
        at += len(values) * span.width
        target = flat[span.start : span.stop].view(f"<u{span.width}")
        target[_places(int(row["way"]), index, len(target))] = values


def _part(old: Bytes, new: Bytes, blocks: list[ByteSpan], which: Iterable[int]) -> Part:
    rows, indices, values = [], [], []
    for i in which:
        span = blocks[i]
        kind = f"<u{span.width}"
        after = new[span.start : span.stop].view(kind)
        changed = old[span.start : span.stop].view(kind) != after
        count = int(np.count_nonzero(changed))
        if count:
            way, index = _index(changed, count, span.width)
            rows.append((i, len(after) if way == ALL else count, len(index), way))
            indices.append(index)
            values.append((after if way == ALL else after[changed]).tobytes())
    return rows, indices, values


def _index(changed: np.ndarray, count: int, width: int) -> tuple[int, bytes]:
    """The shortest way, counting for ALL the unchanged values that it carries along."""
    size = len(changed)
    bitmap = -(-size // 8)
    if (size - count) * width <= min(bitmap, count):
        return ALL, b""
    if count >= bitmap:  # a byte or more per change cannot be shorter
        return BITMAP, np.packbits(changed, bitorder="little").tobytes()
    places = np.flatnonzero(changed)
    gaps = np.diff(places, prepend=-1) - 1
    skips, rest = np.divmod(gaps, 255)
    length = count + int(skips.sum())
    if length > min(2 * count, bitmap):
        if 2 * count < bitmap:
            return PLACES, places.astype("<u2").tobytes()
        return BITMAP, np.packbits(changed, bitorder="little").tobytes()
    out = np.full(length, 255, np.uint8)
    out[np.cumsum(skips + 1) - 1] = rest
    return GAPS, out.tobytes()


def ways(sizes: np.ndarray, counts: np.ndarray, skips: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`_index` for many blocks at once, as far as it decides: the way of each, and the bytes of its index. `skips` are
    the bytes of 255 that GAPS would need beside one per change."""
    bitmap = -(-sizes // 8)
    length = counts + skips
    chosen = np.where(length <= np.minimum(2 * counts, bitmap), GAPS, np.where(2 * counts < bitmap, PLACES, BITMAP))
    chosen = np.where(counts >= bitmap, BITMAP, chosen)
    chosen = np.where((sizes - counts) * width <= np.minimum(bitmap, counts), ALL, chosen)
    nbytes = np.choose(chosen, (np.zeros_like(counts), bitmap, length, 2 * counts))
    return chosen, np.where(counts > 0, nbytes, 0)


def _places(way: int, index: Bytes, size: int) -> Any:
    if way == ALL:
        return slice(None)
    if way == BITMAP:
        return np.unpackbits(index, count=size, bitorder="little").view(np.bool_)
    if way == PLACES:
        return index.view("<u2")
    return (np.cumsum(index + (index != 255), dtype=np.int64) - 1)[index != 255]


def _table(data: Bytes, blocks: list[ByteSpan]) -> tuple[np.ndarray, int]:
    head = len(MAGIC) + 8
    if len(data) < head or data[: len(MAGIC)].tobytes() != MAGIC:
        raise _wrong("it does not begin like one")
    rows = int(data[len(MAGIC) : head].view("<u8")[0])
    start = head + rows * ROW.itemsize
    if rows > len(blocks) or start > len(data):
        raise _wrong(f"{rows} blocks in {len(data)} bytes, of weights with {len(blocks)} blocks")
    table = data[head:start].view(ROW)
    numbers = table["block"].astype(np.int64)
    if rows and (numbers[-1] >= len(blocks) or (np.diff(numbers) <= 0).any()):
        raise _wrong("its blocks are not in order, or not in the weights")
    widths = np.array([s.width for s in blocks], dtype=np.int64)[numbers]
    sizes = start + table["index_bytes"].sum(dtype=np.int64) + (table["changes"] * widths).sum(dtype=np.int64)
    if sizes != len(data):
        raise _wrong(f"its table speaks of {sizes} bytes, and it has {len(data)}")
    return table, start


def _check_index(way: int, changes: int, index: Bytes, size: int) -> None:
    if way == ALL:
        fits = len(index) == 0 and changes == size
    elif way == BITMAP:
        fits = len(index) * 8 in range(size, size + 8) and int(np.bitwise_count(index).sum(dtype=np.int64)) == changes
        fits = fits and (size % 8 == 0 or int(index[-1]) >> size % 8 == 0)
    elif way == GAPS:
        last = int(index.sum(dtype=np.int64)) + int(np.count_nonzero(index != 255))
        fits = np.count_nonzero(index != 255) == changes and last <= size
    elif way == PLACES and len(index) == 2 * changes:
        places = index.view("<u2").astype(np.int64)
        fits = changes > 0 and int(places[-1]) < size and bool((np.diff(places) > 0).all())
    else:
        fits = False
    if not fits:
        raise _wrong("the index of a block does not fit the block")


def _elements(span: ByteSpan) -> int:
    return (span.stop - span.start) // span.width


def _size(parts: list[Part]) -> int:
    return sum(
        len(rows) * ROW.itemsize + sum(map(len, indices)) + sum(map(len, values)) for rows, indices, values in parts
    )


def _flat(buffer: Any, manifest: Manifest) -> Bytes:
    flat = np.frombuffer(buffer, np.uint8)
    if len(flat) < manifest.nbytes:
        raise _wrong(f"the buffer has {len(flat)} bytes, the weights {manifest.nbytes}")
    return flat


def _wrong(what: str) -> WindfallError:
    return WindfallError(what, where="weight delta", fix="The full copy is needed instead.")
