"""Computes the delta from one version of the weights to the next, in plain torch, on the device that holds the weights.

The old version is read from its buffer on the host, so the device keeps no copy of it, and only positions and values of
changed elements come back. This works on slabs of at most SLAB elements: beside a slab, it briefly needs up to about 80
bytes for every changed element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from windfall.weights.delta import BITMAP, GAPS, MAX_RATIO, ROW, DeltaPart, choose_encodings
from windfall.weights.manifest import WIDTHS
from windfall.weights.plan import Piece

BLOCK = 1 << 16  # elements
SLAB = 1 << 26  # elements
SAMPLED = 64  # blocks compared first, if there are many, to give up early on a step that changed nearly everything
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Span(NamedTuple):
    """Some of the rows of a piece, as a range of bytes of the buffer."""

    piece: Piece
    start: int
    stop: int

    @property
    def width(self) -> int:
        return WIDTHS[self.piece.entry.dtype]


def encode(old: np.ndarray, sources: Mapping[Piece, Tensor]) -> list[DeltaPart] | None:
    """The changes from the buffer `old` to the rows in `sources`; None if nearly everything has changed."""
    if _mostly_changed(old, sources):
        return None
    return [_encode(slab, old, sources) for slab in _slabs(_spans(sources, SLAB))]


def _spans(pieces: Iterable[Piece], elements: int) -> Iterator[Span]:
    for piece in pieces:
        step = elements * WIDTHS[piece.entry.dtype]
        for start in range(piece.start, piece.stop, step):
            yield Span(piece, start, min(start + step, piece.stop))


def _slabs(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Spans with elements of one width that are compared at once."""
    slab: list[Span] = []
    held = 0
    for span in spans:
        count = (span.stop - span.start) // span.width
        if slab and (held + count > SLAB or span.width != slab[0].width):
            yield slab
            slab, held = [], 0
        slab.append(span)
        held += count
    if slab:
        yield slab


def _mostly_changed(old: np.ndarray, sources: Mapping[Piece, Tensor]) -> bool:
    """Whether a delta would not be worth it, judged by a sample of blocks."""
    blocks = list(_spans(sources, BLOCK))
    if len(blocks) <= 4 * SAMPLED:
        return False
    changes, elements, nbytes = [], 0, 0
    for span in blocks[:: len(blocks) // SAMPLED]:
        before, after = _both([span], old, sources)
        changes.append((before != after).sum() * span.width)
        elements, nbytes = elements + len(after), nbytes + span.stop - span.start
    return int(torch.stack(changes).sum()) + elements / 8 > MAX_RATIO * nbytes


def _both(slab: list[Span], old: np.ndarray, sources: Mapping[Piece, Tensor]) -> tuple[Tensor, Tensor]:
    """The old and the new elements as integers, on the device of the new ones."""
    kind, width = _INTEGERS[slab[0].width], slab[0].width
    olds, news = [], []
    for p, start, stop in slab:
        rows = sources[p].detach().reshape(-1)[(start - p.start) // width : (stop - p.start) // width]
        published = rows.to(getattr(torch, p.entry.dtype)).contiguous()
        news.append(published.view(torch.uint8).view(kind))
        olds.append(torch.from_numpy(old[start:stop]).to(rows.device, non_blocking=True).view(kind))
    return (olds[0], news[0]) if len(slab) == 1 else (torch.cat(olds), torch.cat(news))


def _encode(slab: list[Span], old: np.ndarray, sources: Mapping[Piece, Tensor]) -> DeltaPart:
    before, after = _both(slab, old, sources)
    step = BLOCK * slab[0].width
    blocks = np.array([(at, min(at + step, s.stop)) for s in slab for at in range(s.start, s.stop, step)])
    sizes = (blocks[:, 1] - blocks[:, 0]) // slab[0].width
    counts, chosen, nbytes, index, values = _compare(before, after, sizes)
    rows = np.zeros(len(counts), ROW)
    rows["start"], rows["elements"] = blocks[:, 0], sizes
    rows["changes"], rows["index_bytes"], rows["encoding"] = counts, nbytes, chosen
    return DeltaPart(rows[counts > 0], _to_host(index), _to_host(values))


def _compare(old: Tensor, new: Tensor, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor, Tensor]:
    """Number of changes, encoding and index bytes of every block; all indices; all values. `sizes`: elements of each
    block."""
    device, ends = old.device, torch.from_numpy(np.cumsum(sizes)).to(old.device)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    at = (old != new).nonzero().view(-1)
    firsts, lasts = torch.searchsorted(at, starts), torch.searchsorted(at, ends)
    block = torch.searchsorted(ends, at, right=True)
    place, rank = at - starts[block], torch.arange(len(at), device=device) - firsts[block]
    gap = torch.where(rank == 0, place, torch.diff(at, prepend=at.new_zeros(1)) - 1)
    skips = gap // 255
    passed = torch.cat((skips.new_zeros(1), skips.cumsum(0)))
    counts, skipped = torch.stack((lasts - firsts, passed[lasts] - passed[firsts])).cpu().numpy()
    chosen, nbytes = choose_encodings(sizes, counts, skipped)
    total = int(nbytes.sum())
    encoding, base, filling, lengths = torch.from_numpy(
        np.stack((chosen, np.cumsum(nbytes) - nbytes, np.where(chosen == GAPS, 255, 0), nbytes))
    ).to(device)
    # One extra byte at the end, as the target of writes that belong to the other encoding.
    out = torch.zeros(total + 1, dtype=torch.uint8, device=device)
    out[:total] = torch.repeat_interleave(filling.to(torch.uint8), lengths, output_size=total)
    mine, base = encoding[block], base[block]
    if (chosen == GAPS).any():
        to = base + rank + passed[1:] - passed[firsts][block]
        out[torch.where(mine == GAPS, to, total)] = (gap - 255 * skips).to(torch.uint8)
    if (chosen == BITMAP).any():
        bits = torch.zeros(total + 1, dtype=torch.int32, device=device)
        bits.index_add_(0, torch.where(mine == BITMAP, base + (place >> 3), total), (1 << (place & 7)).int())
        out[:total] += bits[:total].to(torch.uint8)
    return counts, chosen, nbytes, out[:total], new[at].view(torch.uint8)


def _to_host(data: Tensor) -> np.ndarray:
    if data.device.type == "cpu":
        return data.numpy()
    return torch.empty(data.shape, dtype=data.dtype, pin_memory=True).copy_(data).numpy()
