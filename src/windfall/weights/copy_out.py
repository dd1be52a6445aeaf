"""Copies a rank's rows of a version into the buffer, from a GPU on a separate stream and into locked pages.

The functions import torch when they are called.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from windfall.weights.buffers import Buffer
from windfall.weights.plan import Piece

if TYPE_CHECKING:
    import torch

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


def copy(buffer: Buffer, sources: Mapping[Piece, torch.Tensor], after: Any, pages: LockedPages) -> None:
    """Copy the rows, and wait until they have arrived. `after`: from `ready_event`, maybe of another thread."""
    import torch

    if after is None:
        for piece, source in sources.items():
            target(buffer, piece).view(source.shape).copy_(source)
        return
    pages.lock(buffer, list(sources))
    stream = torch.cuda.Stream(next(iter(sources.values())).device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        for piece, source in sources.items():
            to = target(buffer, piece)
            to.copy_(source.to(to.dtype).contiguous().view(-1), non_blocking=True)
    stream.synchronize()


def target(buffer: Buffer, piece: Piece) -> torch.Tensor:
    """The part of the buffer for these rows, as a flat tensor."""
    import torch

    flat = torch.from_numpy(buffer.data[piece.start : piece.stop])
    return flat.view(getattr(torch, piece.entry.dtype))


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
