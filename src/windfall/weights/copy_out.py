"""From the tensors of a version into its buffer. From a GPU: on a stream of its own, in the order of the buffer, with
an event after every piece, so that what has arrived can be worked on while the rest is on its way.

Imports torch when called.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from windfall.weights.buffers import Buffer
from windfall.weights.manifest import TensorEntry

if TYPE_CHECKING:
    import torch

PIECE_BYTES = 32 << 20
"""Copied between two events."""


def mark(tensors: Iterable[torch.Tensor]) -> Any:
    """An event after which tensors of one GPU are what they are to be now; None if they are not of one GPU."""
    import torch

    devices = {t.device for t in tensors}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(next(iter(devices))))
    return event


def copy(buffer: Buffer, sources: Mapping[TensorEntry, torch.Tensor], after: Any) -> Iterator[tuple[int, Any]]:
    """Pairs in rising order: once the event has come (None: now), all bytes up to there have. `after` is what `mark`
    gave, perhaps in another thread. Asking a GPU for copies can take as long as the copies."""
    import torch

    rows = sorted(((e, t.detach()) for e, t in sources.items() if e.nbytes), key=lambda row: row[0].offset)
    if after is None or not rows:
        for entry, source in rows:
            _place(buffer, entry).view(entry.shape).copy_(source)
        yield buffer.nbytes, None
        return
    side, since = torch.cuda.Stream(rows[0][1].device), 0
    side.wait_event(after)
    with torch.cuda.stream(side):
        for entry, source in rows:
            target = _place(buffer, entry)
            flat, width = source.to(target.dtype).contiguous().view(-1), target.element_size()
            for at in range(0, len(flat), PIECE_BYTES // width):
                piece = slice(at, min(at + PIECE_BYTES // width, len(flat)))
                target[piece].copy_(flat[piece], non_blocking=True)
                end = entry.offset + piece.stop * width
                if end - since >= PIECE_BYTES or end == buffer.nbytes:
                    event, since = torch.cuda.Event(blocking=True), end
                    event.record(side)
                    yield end, event


def settle(tensors: Iterable[torch.Tensor], last: Any) -> None:
    """Until nothing reads the tensors any more, and nothing writes to the buffer. `last`: the last event of `copy`."""
    import torch

    if last is not None:
        last.synchronize()
    for device in {t.device for t in tensors if t.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()


def _place(buffer: Buffer, entry: TensorEntry) -> torch.Tensor:
    """Where a tensor's elements go, flat."""
    import torch

    flat = torch.from_numpy(buffer.data[entry.offset : entry.offset + entry.nbytes])
    return flat.view(getattr(torch, entry.dtype))
