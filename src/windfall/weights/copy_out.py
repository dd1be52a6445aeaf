"""Copies a rank's rows of a version into the buffer. Copies from a GPU run on a separate stream, in the order of the
buffer, with an event after every piece, so that the bytes that have arrived can be hashed while the rest is copied.

The functions import torch when they are called.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from windfall.weights.buffers import Buffer
from windfall.weights.plan import Piece

if TYPE_CHECKING:
    import torch

COPY_BYTES = 32 << 20  # bytes copied between two events
MAX_GAP_BYTES = 64 << 10  # two ranges that are at most this far apart are locked as one


def ready_event(tensors: Iterable[torch.Tensor]) -> Any:
    """Record an event after which the tensors have their present values. None if they are not all on one GPU."""
    import torch

    devices = {t.device for t in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(next(iter(devices))))
    return event


def copy(buffer: Buffer, sources: Mapping[Piece, torch.Tensor], after: Any) -> Iterator[tuple[int, Any]]:
    """Copy the rows, and yield pairs (end, event) with rising `end`: after the event (None: now), all of these rows up
    to byte `end` of the buffer have arrived. The last `end` is the end of the buffer. `after`: from `ready_event`,
    maybe of another thread. Enqueueing may take as long as copying."""
    import torch

    rows = sorted(((p, t.detach()) for p, t in sources.items()), key=lambda row: row[0].start)
    if after is None or not rows:
        for piece, source in rows:
            _target(buffer, piece).view(source.shape).copy_(source)
        yield buffer.nbytes, None
        return
    stream, pending = torch.cuda.Stream(rows[0][1].device), 0
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        for n, (piece, source) in enumerate(rows):
            target = _target(buffer, piece)
            flat, width = source.to(target.dtype).contiguous().view(-1), target.element_size()
            for at in range(0, len(flat), COPY_BYTES // width):
                part = slice(at, min(at + COPY_BYTES // width, len(flat)))
                target[part].copy_(flat[part], non_blocking=True)
                pending += (part.stop - part.start) * width
                last = n == len(rows) - 1 and part.stop == len(flat)
                if pending >= COPY_BYTES or last:
                    event, pending = torch.cuda.Event(blocking=True), 0
                    event.record(stream)
                    yield buffer.nbytes if last else piece.start + part.stop * width, event


def wait(tensors: Iterable[torch.Tensor], last: Any) -> None:
    """Wait until nothing reads the tensors or writes to the buffer any more. `last` is the last event of `copy`."""
    import torch

    if last is not None:
        last.synchronize()
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


class LockedPages:
    """Locks the pages that a GPU copies to, once: a copy into pageable memory is several times slower."""

    def __init__(self) -> None:
        self._locked: dict[int, tuple[list[tuple[int, int]], list[int]]] = {}  # by descriptor: ranges, addresses

    def lock(self, buffer: Buffer, pieces: Sequence[Piece]) -> None:
        import torch

        ranges = page_ranges(pieces, buffer.nbytes)
        if self._locked.get(buffer.fd, ([], []))[0] == ranges:
            return
        self.unlock(buffer)
        runtime: Any = torch.cuda.cudart()
        base, done = buffer.data.ctypes.data, []
        for start, stop in ranges:
            if int(runtime.cudaHostRegister(base + start, stop - start, 1)) == 0:
                done.append(base + start)
        self._locked[buffer.fd] = ranges, done

    def unlock(self, buffer: Buffer) -> None:
        if buffer.fd in self._locked:
            import torch

            runtime: Any = torch.cuda.cudart()
            for address in self._locked.pop(buffer.fd)[1]:
                runtime.cudaHostUnregister(address)


def page_ranges(pieces: Sequence[Piece], nbytes: int) -> list[tuple[int, int]]:
    """Ranges of whole pages that cover the pieces, which are in order. Near ranges are joined."""
    out: list[tuple[int, int]] = []
    for piece in pieces:
        start = piece.start // mmap.PAGESIZE * mmap.PAGESIZE
        stop = min(-(-piece.stop // mmap.PAGESIZE) * mmap.PAGESIZE, nbytes)
        if out and start - out[-1][1] <= MAX_GAP_BYTES:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return out


def _target(buffer: Buffer, piece: Piece) -> torch.Tensor:
    """The part of the buffer for these rows, as a flat tensor."""
    import torch

    flat = torch.from_numpy(buffer.data[piece.start : piece.stop])
    return flat.view(getattr(torch, piece.entry.dtype))
