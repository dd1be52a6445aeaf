"""Copies the tensors of a version into its buffer. Copies from a GPU run on a separate stream, in the order of the
buffer, with an event after every piece, so that the bytes that have arrived can be hashed while the rest is copied.

The functions import torch when they are called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from windfall.weights.buffers import Buffer
from windfall.weights.manifest import TensorEntry

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 32 << 20  # bytes copied between two events


def ready_event(tensors: Iterable[torch.Tensor]) -> Any:
    """Record an event after which the tensors have their present values. None if they are not all on one GPU."""
    import torch

    devices = {t.device for t in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(next(iter(devices))))
    return event


def copy(buffer: Buffer, sources: Mapping[TensorEntry, torch.Tensor], after: Any) -> Iterator[tuple[int, Any]]:
    """Copy the tensors, and yield pairs (end, event) with rising `end`: after the event (None: now), all bytes up to
    `end` have arrived. `after`: from `ready_event`, maybe of another thread. Enqueueing may take as long as copying."""
    import torch

    rows = sorted(((e, t.detach()) for e, t in sources.items() if e.nbytes), key=lambda row: row[0].offset)
    if after is None or not rows:
        for entry, source in rows:
            _target(buffer, entry).view(entry.shape).copy_(source)
        yield buffer.nbytes, None
        return
    stream, recorded = torch.cuda.Stream(rows[0][1].device), 0
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        for entry, source in rows:
            target = _target(buffer, entry)
            flat, width = source.to(target.dtype).contiguous().view(-1), target.element_size()
            for at in range(0, len(flat), PIECE_BYTES // width):
                piece = slice(at, min(at + PIECE_BYTES // width, len(flat)))
                target[piece].copy_(flat[piece], non_blocking=True)
                end = entry.offset + piece.stop * width
                if end - recorded >= PIECE_BYTES or end == buffer.nbytes:
                    event, recorded = torch.cuda.Event(blocking=True), end
                    event.record(stream)
                    yield end, event


def wait(tensors: Iterable[torch.Tensor], last: Any) -> None:
    """Wait until nothing reads the tensors or writes to the buffer any more. `last` is the last event of `copy`."""
    import torch

    if last is not None:
        last.synchronize()
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _target(buffer: Buffer, entry: TensorEntry) -> torch.Tensor:
    """The part of the buffer for one tensor, as a flat tensor."""
    import torch

    flat = torch.from_numpy(buffer.data[entry.offset : entry.offset + entry.nbytes])
    return flat.view(getattr(torch, entry.dtype))
