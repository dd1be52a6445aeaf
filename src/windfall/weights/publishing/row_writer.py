"""Writes the rows of a rank into the buffer of a new version, and compares them with the previous version meanwhile.

The buffer is cut into slabs, at bounds of chunks, so that a chunk can be hashed as soon as its slab is written. A slab
may have rows of many small tensors, or a part of a large one. Rows on a GPU are gathered there in the layout of the
slab, so that all further steps handle the whole slab:

    rows ──▶ slab on the GPU ──▶ buffer of the new version ──▶ hashes
                 └──▶ compare ◀── buffer of the previous version

Several threads each take a slab through these steps on a stream of their own, so that copies in both directions and
comparisons overlap. The host waits twice for each slab: for the number of changes, and for the end. The pages of the
buffers are locked: a copy from or to other memory is several times slower. The GPU keeps no copy of the previous
version. Beside two slabs, every thread briefly needs about 50 bytes of GPU memory for every changed element; if there
is no memory for a slab, the host compares it.

Rows in host memory are written by one thread, because torch uses all cores for one operation.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.weights.buffers import Buffer
from windfall.weights.delta import MAX_RATIO, SKIP, SpanDelta
from windfall.weights.manifest import ALIGN_BYTES, WIDTHS
from windfall.weights.publishing.plan import Piece

SLAB_BYTES = 64 << 20
THREADS = 4
CPU = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slab(NamedTuple):
    """The rows of this rank in some consecutive chunks."""

    start: int
    stop: int
    pieces: list[tuple[Piece, int, int]]  # with the range of each that is in the slab
    runs: list[tuple[int, int]]  # ranges with no rows of other ranks
    chunks: range

    @property
    def width(self) -> int:
        """Width in bytes of the elements that are compared. A wider element counts as several."""
        return min(WIDTHS[piece.entry.dtype] for piece, _, _ in self.pieces)

    @property
    def origin(self) -> int:
        """Where copies of the slab begin, so that all tensors are aligned in them."""
        return self.start // ALIGN_BYTES * ALIGN_BYTES


def slabs(pieces: Iterable[Piece], bounds: Sequence[int]) -> Iterator[Slab]:
    """Cut the buffer into slabs of at most SLAB_BYTES, or of one chunk. `pieces` are in order."""
    left, first = list(pieces)[::-1], 0
    while left:
        last = max(first + 1, bisect_right(bounds, bounds[first] + SLAB_BYTES) - 1)
        mine: list[tuple[Piece, int, int]] = []
        runs: list[tuple[int, int]] = []
        while left and left[-1].start < bounds[last]:
            piece = left[-1]
            start, stop = max(piece.start, bounds[first]), min(piece.stop, bounds[last])
            if runs and (start == runs[-1][1] or _follows(piece, mine[-1][0])):
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((start, stop))
            mine.append((piece, start, stop))
            if piece.stop > bounds[last]:
                break
            left.pop()
        if mine:
            yield Slab(mine[0][1], mine[-1][2], mine, runs, range(first, last))
        first = last


def _follows(piece: Piece, other: Piece) -> bool:
    """Whether nothing but unused bytes is between the other piece and this one."""
    end = other.entry.offset + other.entry.nbytes
    aligned = -(-end // ALIGN_BYTES) * ALIGN_BYTES
    return other.stop == end and piece.start == piece.entry.offset == aligned


def write(
    buffer: Buffer,
    values: Mapping[Piece, Tensor],
    bounds: Sequence[int],
    *,
    old: Buffer | None = None,
    written: Callable[[range], object] = lambda chunks: None,
    differences: bool = False,
) -> list[SpanDelta] | None:
    """Write the rows, and return their changes since the version in the buffer `old`; None if there is no such version,
    or nearly everything has changed. `values`: in the order of the buffer. `bounds`: of the chunks. `written` is called
    with chunks whose rows of this rank are written, in any thread. `differences`: instead of new values."""
    delta, too_large = [], threading.Event()

    def write_slab(slab: Slab, device: torch.device) -> None:
        staged, target = device.type == "cuda" or len(slab.runs) > 1, _stored(slab, buffer)
        new = torch.zeros(len(target), dtype=torch.uint8, device=device) if staged else target
        for piece, start, stop in slab.pieces:
            _gather(piece, values[piece], start, stop, new[start - slab.origin : stop - slab.origin])
        if staged:
            _copy_runs(slab, target, new)
        fetched = None
        if old is not None and not too_large.is_set():
            before = _stored(slab, old)
            if staged:
                before = _copy_runs(slab, torch.zeros_like(new), before)
            fetched = encode(slab, before, new, differences)
            if fetched is None:
                too_large.set()
        _synchronize(device)
        if fetched is not None:
            index, length, changed = (t.numpy() for t in fetched)
            elements = (slab.stop - slab.start) // changed.itemsize
            delta.append(SpanDelta(slab.start, elements, index[: int(length)].copy(), changed.copy()))

    def write_somehow(slab: Slab, device: torch.device) -> None:
        try:
            write_slab(slab, device)
        except torch.OutOfMemoryError:
            _synchronize(device)
            write_slab(slab, CPU)

    devices = {t.device for t in values.values()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        buffer.lock([(piece.start, piece.stop) for piece in values])
        _write_from_gpu(next(iter(devices)), list(slabs(values, bounds)), write_somehow, written)
    else:
        for slab in slabs(values, bounds):
            write_somehow(slab, CPU)
            written(slab.chunks)
    return None if old is None or too_large.is_set() else sorted(delta, key=lambda span: span.start)


def encode(slab: Slab, old: Tensor, new: Tensor, differences: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """The index, its length, and the values of the changes of a slab, in host memory once the stream has come there.
    None if the slab is large, and the changes would take about as many bytes as the slab."""
    nbytes, width = sum(stop - start for start, stop in slab.runs), slab.width
    old, new = (t[slab.start - slab.origin :].view(_INTEGERS[width]) for t in (old, new))
    if new.is_cuda:
        at = (old != new).nonzero().view(-1)
    else:  # numpy needs a third of the time
        at = torch.from_numpy(np.flatnonzero(old.numpy() != new.numpy()))
    if nbytes >= SLAB_BYTES // 8 and len(at) * (1 + width) > MAX_RATIO * nbytes:
        return None
    gaps = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    ends = (gaps // SKIP + 1).cumsum(0)
    index = torch.full((len(at) + len(new) // SKIP,), SKIP, dtype=torch.uint8, device=at.device)
    index[ends - 1] = (gaps % SKIP).to(torch.uint8)
    changed = new[at] - old[at] if differences else new[at]
    index, length, changed = (t.to("cpu", non_blocking=True) for t in (index, ends[-1:].sum(), changed))
    return index, length, changed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _write_from_gpu(
    device: torch.device,
    todo: list[Slab],
    write_slab: Callable[[Slab, torch.device], None],
    written: Callable[[range], object],
) -> None:
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(device))
    streams = _streams(device)

    def run(slab: Slab) -> None:
        stream = streams.get()
        try:
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                write_slab(slab, device)
        finally:
            streams.put(stream)
        written(slab.chunks)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="write-rows") as threads:
        list(threads.map(run, todo))


@functools.cache
def _streams(device: torch.device) -> SimpleQueue[torch.cuda.Stream]:
    """Always the same ones: torch keeps the memory that was used on a stream for that stream."""
    streams: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
    for _ in range(THREADS):
        streams.put(torch.cuda.Stream(device))
    return streams


def _stored(slab: Slab, buffer: Buffer) -> Tensor:
    """The bytes of a slab in a buffer."""
    return torch.from_numpy(buffer.data[slab.origin : slab.stop])


def _copy_runs(slab: Slab, target: Tensor, source: Tensor) -> Tensor:
    """Copy what has rows of this rank only."""
    for start, stop in slab.runs:
        here = slice(start - slab.origin, stop - slab.origin)
        target[here].copy_(source[here], non_blocking=True)
    return target


def _gather(piece: Piece, rows: Tensor, start: int, stop: int, target: Tensor) -> None:
    """Copy bytes `start` to `stop` of a piece, in the published dtype."""
    width = WIDTHS[piece.entry.dtype]
    flat = rows.detach().reshape(-1)[(start - piece.start) // width : (stop - piece.start) // width]
    target.view(getattr(torch, piece.entry.dtype)).copy_(flat)
