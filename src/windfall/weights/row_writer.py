"""Writes the rows of a rank into the buffer of a new version, and compares them with the previous version meanwhile.

The rows are split into spans. Rows on a GPU are written by several threads; each takes a span through all stages, so
copies in both directions, comparing and hashing overlap:

    rows on the GPU ──▶ buffer of the new version ──▶ checksums
          └──▶ compare ◀── buffer of the previous version

The pages of the buffers are locked: a copy from or to other memory is several times slower. The GPU keeps no copy of
the previous version, and only positions and values of changed elements come back. Beside the span, every thread briefly
needs about 50 bytes of GPU memory for every changed element.

Rows in host memory are written by one thread, because torch uses all cores for one operation.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from windfall.weights.buffers import Buffer
from windfall.weights.delta import MAX_RATIO, SKIP, SpanDelta
from windfall.weights.manifest import WIDTHS
from windfall.weights.plan import Piece

SPAN_BYTES = 32 << 20
THREADS = 8
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Span(NamedTuple):
    """Some of the rows of a piece, as a range of bytes of the buffer."""

    piece: Piece
    start: int
    stop: int


def write(
    buffer: Buffer,
    values: Mapping[Piece, Tensor],
    old: Buffer | None,
    written: Callable[[int, int], object],
) -> list[SpanDelta] | None:
    """Write the rows, and return their changes since the version in the buffer `old`; None if there is no such version,
    or nearly everything has changed. `written` is called in a thread with every range that was written from a GPU."""
    delta, too_large = [], threading.Event()

    def write_span(span: Span) -> None:
        new = _elements(span, values)
        target = _stored(span, buffer)
        target.copy_(new, non_blocking=True)
        if old is not None and not too_large.is_set():
            before = _stored(span, old)
            try:
                found = encode(span, before.to(new.device, non_blocking=True), new)
            except torch.OutOfMemoryError:
                _synchronize(new.device)
                found = encode(span, before, target)
            if found is None:
                too_large.set()
            else:
                delta.append(found)
        _synchronize(new.device)

    devices = {t.device for t in values.values()}
    if len(devices) == 1 and next(iter(devices)).type == "cuda":
        buffer.lock([(piece.start, piece.stop) for piece in values])
        _write_from_gpu(next(iter(devices)), list(_spans(values)), write_span, written)
    else:
        for span in _spans(values):
            write_span(span)
    return None if old is None or too_large.is_set() else sorted(delta, key=lambda span: span.start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _write_from_gpu(
    device: torch.device, spans: list[Span], write_span: Callable[[Span], None], written: Callable[[int, int], object]
) -> None:
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(device))
    streams = _streams(device)

    def run(span: Span) -> None:
        stream = streams.get()
        try:
            stream.wait_event(ready)
            with torch.cuda.stream(stream):
                write_span(span)
        finally:
            streams.put(stream)
        written(span.start, span.stop)

    with ThreadPoolExecutor(THREADS, thread_name_prefix="write-rows") as threads:
        list(threads.map(run, spans))


@functools.cache
def _streams(device: torch.device) -> SimpleQueue[torch.cuda.Stream]:
    """Always the same ones: torch keeps the memory that was used on a stream for that stream."""
    streams: SimpleQueue[torch.cuda.Stream] = SimpleQueue()
    for _ in range(THREADS):
        streams.put(torch.cuda.Stream(device))
    return streams


def _spans(pieces: Mapping[Piece, Tensor]) -> Iterator[Span]:
    """Cut pieces at multiples of SPAN_BYTES in the buffer, so that most chunks are within one span."""
    for piece in pieces:
        start = piece.start
        while start < piece.stop:
            stop = min((start // SPAN_BYTES + 1) * SPAN_BYTES, piece.stop)
            yield Span(piece, start, stop)
            start = stop


def _stored(span: Span, buffer: Buffer) -> Tensor:
    """The elements of a span in a buffer, as integers."""
    return torch.from_numpy(buffer.data[span.start : span.stop]).view(_INTEGERS[WIDTHS[span.piece.entry.dtype]])


def _elements(span: Span, values: Mapping[Piece, Tensor]) -> Tensor:
    """The elements of a span in the published dtype, as integers."""
    piece, start, stop = span
    width = WIDTHS[piece.entry.dtype]
    rows = values[piece].detach().reshape(-1)[(start - piece.start) // width : (stop - piece.start) // width]
    published = rows.to(getattr(torch, piece.entry.dtype)).contiguous()
    return published.view(torch.uint8).view(_INTEGERS[width])


def encode(span: Span, old: Tensor, new: Tensor) -> SpanDelta | None:
    """The changes of a span. None if it is large, and the changes would take about as many bytes as the span."""
    at = (old != new).nonzero().view(-1)
    large = span.stop - span.start >= SPAN_BYTES // 2
    if large and len(at) * (1 + new.element_size()) > MAX_RATIO * (span.stop - span.start):
        return None
    gaps = torch.diff(at, prepend=at.new_full((1,), -1)) - 1
    ends = (gaps // SKIP + 1).cumsum(0)
    index = torch.full((int(ends[-1]) if len(at) else 0,), SKIP, dtype=torch.uint8, device=at.device)
    index[ends - 1] = (gaps % SKIP).to(torch.uint8)
    return SpanDelta(span.start, len(new), index.cpu().numpy(), new[at].cpu().numpy())
