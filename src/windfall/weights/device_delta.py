"""The step from one version of the weights to the next, found where the weights are.

A Shadow is a copy of what was published last, on the same device: as many bytes as the version has, 2 per bfloat16
parameter. The new weights are compared with it there, and only the places and values of what changed cross the bus. The
blob is the one that delta.encode would make, bit for bit. Works on slabs of about SLAB elements, so beside the copy it
needs up to about 80 bytes for every element of a slab that changed, for a moment. Plain torch: a CPU can do it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.free_memory import free_bytes
from windfall.weights import delta
from windfall.weights.delta import ALL, BITMAP, BLOCK, GAPS, PLACES, ROW, Part
from windfall.weights.manifest import WIDTHS, Manifest, TensorEntry

SLAB = 1 << 27
SHARE = 0.2
"""Of the device's free memory, that a shadow may take."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def room(nbytes: int, device: torch.device) -> bool:
    """Whether there is room for a shadow of a version of so many bytes."""
    return device.type == "cuda" and nbytes <= SHARE * free_bytes(device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slab:
    """Blocks that are compared at once: those of some pieces of tensors, in order, all of one width."""

    width: int
    pieces: list[tuple[int, int, int]]
    """Offset of the tensor; first byte and byte after the last, in the buffer."""
    blocks: np.ndarray
    """Their numbers."""
    sizes: np.ndarray
    """Their elements."""
    ends: Tensor
    """The same summed up, on the device."""


class Shadow:
    def __init__(self, entries: tuple[TensorEntry, ...], nbytes: int, device: torch.device) -> None:
        self.entries, self.device = entries, device
        self.version: int | None = None
        """Whose bytes it has; None: nobody's."""
        self._flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._slabs: list[Slab] = []
        self._look: list[Slab] = []
        self._host = torch.empty(0, dtype=torch.uint8)
        """What crossed the bus, in pinned memory; used again by the next `encode`."""

    def take(self, sources: Mapping[TensorEntry, Tensor], version: int) -> None:
        self.version = None
        for entry, source in sources.items():
            if entry.nbytes:
                target = self._flat[entry.offset : entry.offset + entry.nbytes]
                target.view(getattr(torch, entry.dtype)).view(entry.shape).copy_(source.detach())
        self.version = version

    def encode(self, sources: Mapping[TensorEntry, Tensor], manifest: Manifest, worth: float = 0.9) -> list[Any] | None:
        """What `delta.join` gives for the step to `sources`, to be used before the next call. `manifest` is that of any
        version of this layout."""
        new = {e.offset: _flat(e, source) for e, source in sources.items() if e.nbytes}
        if not self._slabs:
            self._plan(manifest)
        if self._look:
            nbytes = sum(stop - start for slab in self._look for _, start, stop in slab.pieces)
            if not delta.worthwhile([self._part(slab, new) for slab in self._look], nbytes, worth):
                return None
        pieces = delta.join([self._part(slab, new) for slab in self._slabs], manifest.nbytes, worth)
        return None if pieces is None else self._fetch(pieces)

    def _plan(self, manifest: Manifest) -> None:
        ranges = manifest.ranges()
        first, starts = 0, []
        for e in ranges:
            each = BLOCK * WIDTHS[e.dtype]
            starts.append(np.arange(e.offset, e.offset + e.nbytes, each))
            first += len(starts[-1])
        self._slabs = list(_slabs([(e, e.offset, e.offset + e.nbytes) for e in ranges], range(first), self.device))
        some = delta.first_look(first)
        if some is not None:
            chosen = np.concatenate(starts)[some.start : some.stop : some.step]
            of = np.searchsorted([e.offset for e in ranges], chosen, "right") - 1
            spans = []
            for i, start in zip(of, chosen.tolist(), strict=True):
                e = ranges[i]
                spans.append((e, start, min(start + BLOCK * WIDTHS[e.dtype], e.offset + e.nbytes)))
            self._look = list(_slabs(spans, some, self.device))

    def _part(self, slab: Slab, new: Mapping[int, Tensor]) -> Part:
        kind, width = _INTEGERS[slab.width], slab.width
        olds = [self._flat[start:stop].view(kind) for _, start, stop in slab.pieces]
        news = [new[home][(start - home) // width : (stop - home) // width] for home, start, stop in slab.pieces]
        old, changed = (x[0] if len(x) == 1 else torch.cat(x) for x in (olds, news))
        counts, chosen, nbytes, index, values = _compare(old, changed, slab)
        rows = np.zeros(len(counts), ROW)
        rows["block"], rows["index_bytes"], rows["way"] = slab.blocks, nbytes, chosen
        rows["changes"] = np.where(chosen == ALL, slab.sizes, counts)
        return rows[counts > 0], [index], [values]

    def _fetch(self, pieces: list[Any]) -> list[Any]:
        """The same with all of it on the host."""
        if self.device.type != "cuda":
            return [p.numpy() if isinstance(p, Tensor) else p for p in pieces]
        nbytes, at = sum(len(p) for p in pieces if isinstance(p, Tensor)), 0
        if nbytes > len(self._host):
            self._host = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8, pin_memory=True)
        out = []
        for p in pieces:
            if isinstance(p, Tensor):
                self._host[at : at + len(p)].copy_(p, non_blocking=True)
                out.append(self._host[at : at + len(p)].numpy())
                at += len(p)
            else:
                out.append(p)
        torch.cuda.current_stream(self.device).synchronize()
        return out


def _flat(entry: TensorEntry, source: Tensor) -> Tensor:
    """As integers: what would be published of it."""
    values = source.detach().to(getattr(torch, entry.dtype)).contiguous().view(-1)
    return values.view(torch.uint8).view(_INTEGERS[WIDTHS[entry.dtype]])


def _slabs(spans: list[tuple[TensorEntry, int, int]], numbers: range, device: torch.device) -> Iterator[Slab]:
    """Spans are bytes of whole blocks, or up to the end of their tensor; `numbers` are those of all their blocks."""
    pieces: list[tuple[int, int, int]] = []
    sizes: list[np.ndarray] = []
    held = width = done = 0

    def made() -> Slab:
        nonlocal pieces, sizes, held, done
        every = np.concatenate(sizes)
        which = np.arange(numbers.start, numbers.stop, numbers.step)[done : done + len(every)]
        slab = Slab(
            width=width, pieces=pieces, blocks=which, sizes=every,
            ends=torch.from_numpy(np.cumsum(every)).to(device),
        )  # fmt: skip
        pieces, sizes, held, done = [], [], 0, done + len(every)
        return slab

    for entry, start, stop in spans:
        if pieces and WIDTHS[entry.dtype] != width:
            yield made()
        width = WIDTHS[entry.dtype]
        while start < stop:
            if held and held + BLOCK > SLAB:
                yield made()
            upto = min(stop, start + max(1, (SLAB - held) // BLOCK) * BLOCK * width)
            count = (upto - start) // width
            each = np.full(-(-count // BLOCK), BLOCK, np.int64)
            each[-1] = count - BLOCK * (len(each) - 1)
            pieces.append((entry.offset, start, upto))
            sizes.append(each)
            held, start = held + count, upto
    if pieces:
        yield made()


def _compare(old: Tensor, new: Tensor, slab: Slab) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor, Tensor]:
    """Changes, way and index bytes of every block; all their indices, all their values."""
    device, changed, ends = old.device, old != new, slab.ends
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    at = changed.nonzero().view(-1)
    firsts, lasts = torch.searchsorted(at, starts), torch.searchsorted(at, ends)
    block = torch.searchsorted(ends, at, right=True)
    place, rank = at - starts[block], torch.arange(len(at), device=device) - firsts[block]
    gap = torch.where(rank == 0, place, torch.diff(at, prepend=at.new_zeros(1)) - 1)
    skips = gap // 255
    passed = torch.cat((skips.new_zeros(1), skips.cumsum(0)))
    counts, skipped = torch.stack((lasts - firsts, passed[lasts] - passed[firsts])).cpu().numpy()
    chosen, nbytes = delta.ways(slab.sizes, counts, skipped, slab.width)
    total = int(nbytes.sum())
    way, base, filling, lengths = torch.from_numpy(
        np.stack((chosen, np.cumsum(nbytes) - nbytes, np.where(chosen == GAPS, 255, 0), nbytes))
    ).to(device)
    # One place more than there is: where everything goes that is not of the way being written.
    out = torch.zeros(total + 1, dtype=torch.uint8, device=device)
    out[:total] = torch.repeat_interleave(filling.to(torch.uint8), lengths, output_size=total)
    mine, base = way[block], base[block]
    if (chosen == GAPS).any():
        to = base + rank + passed[1:] - passed[firsts][block]
        out[torch.where(mine == GAPS, to, total)] = (gap - 255 * skips).to(torch.uint8)
    if (chosen == PLACES).any():
        to = base + 2 * rank
        out[torch.where(mine == PLACES, to, total)] = (place & 255).to(torch.uint8)
        out[torch.where(mine == PLACES, to + 1, total)] = (place >> 8).to(torch.uint8)
    if (chosen == BITMAP).any():
        bits = torch.zeros(total + 1, dtype=torch.int32, device=device)
        bits.index_add_(0, torch.where(mine == BITMAP, base + (place >> 3), total), (1 << (place & 7)).int())
        out[:total] += bits[:total].to(torch.uint8)
    if (chosen == ALL).any():
        whole = torch.repeat_interleave((way == ALL) & (lasts > firsts), ends - starts, output_size=len(old))
        at = (changed | whole).nonzero().view(-1)
    return counts, chosen, nbytes, out[:total], new[at].view(torch.uint8)
