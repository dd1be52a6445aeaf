"""Computes the delta from one version of the weights to the next on the device that holds the weights.

A DeviceDelta keeps a copy of the last published version on that device: as many bytes as the version has, 2 per
bfloat16 parameter. It compares the new weights with this copy, and only positions and values of changed elements cross
the bus. The blob is identical to that of delta.encode, bit for bit. It works on slabs of about SLAB elements, so in
addition to the copy it briefly needs up to about 80 bytes for every changed element of a slab. It is plain torch and
also runs on a CPU.
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
from windfall.weights.delta import ALL, BITMAP, BLOCK, GAPS, POSITIONS, ROW, Part
from windfall.weights.manifest import WIDTHS, Manifest, TensorEntry

SLAB = 1 << 27
MAX_MEMORY_SHARE = 0.2  # share of the device's free memory that the copy may take
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether the device has room for a copy of a version of `nbytes`."""
    return device.type == "cuda" and nbytes <= MAX_MEMORY_SHARE * free_bytes(device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slab:
    """Blocks that are compared at once. They cover consecutive pieces of tensors with elements of one width."""

    width: int
    pieces: list[tuple[int, int, int]]  # for each piece: offset of its tensor, first byte and end, all in the buffer
    blocks: np.ndarray  # numbers of the blocks
    sizes: np.ndarray  # elements of each block
    ends: Tensor  # cumulative sum of `sizes`, on the device


class DeviceDelta:
    def __init__(self, entries: tuple[TensorEntry, ...], nbytes: int, device: torch.device) -> None:
        self.entries, self.device = entries, device
        self.version: int | None = None  # version that the copy holds; None if it holds no complete version
        self._flat = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._slabs: list[Slab] = []
        self._sample: list[Slab] = []
        self._host = torch.empty(0, dtype=torch.uint8)  # pinned memory for the bytes that cross the bus; reused

    def store(self, sources: Mapping[TensorEntry, Tensor], version: int) -> None:
        """Copy this version, as the base of the next delta."""
        self.version = None
        for entry, source in sources.items():
            if entry.nbytes:
                target = self._flat[entry.offset : entry.offset + entry.nbytes]
                target.view(getattr(torch, entry.dtype)).view(entry.shape).copy_(source.detach())
        self.version = version

    def encode(
        self, sources: Mapping[TensorEntry, Tensor], manifest: Manifest, max_ratio: float = 0.9
    ) -> list[Any] | None:
        """The pieces of the delta to `sources`, as from `delta.join`. They are valid until the next call. `manifest`
        may be that of any version with this layout."""
        new = {e.offset: _flat(e, source) for e, source in sources.items() if e.nbytes}
        if not self._slabs:
            self._plan(manifest)
        if self._sample:
            nbytes = sum(stop - start for slab in self._sample for _, start, stop in slab.pieces)
            if not delta.worthwhile([self._part(slab, new) for slab in self._sample], nbytes, max_ratio):
                return None
        pieces = delta.join([self._part(slab, new) for slab in self._slabs], manifest.nbytes, max_ratio)
        return None if pieces is None else self._copy_to_host(pieces)

    def _plan(self, manifest: Manifest) -> None:
        ranges, blocks = manifest.ranges(), delta.spans(manifest)
        whole = [(e, e.offset, e.offset + e.nbytes) for e in ranges]
        self._slabs = list(_slabs(whole, range(len(blocks)), self.device))
        sample = delta.sample_blocks(len(blocks))
        if sample is not None:
            chosen = [blocks[i] for i in sample]
            owners = np.searchsorted([e.offset for e in ranges], [b.start for b in chosen], "right") - 1
            spans = [(ranges[i], b.start, b.stop) for i, b in zip(owners, chosen, strict=True)]
            self._sample = list(_slabs(spans, sample, self.device))

    def _part(self, slab: Slab, new: Mapping[int, Tensor]) -> Part:
        kind, width = _INTEGERS[slab.width], slab.width
        olds = [self._flat[start:stop].view(kind) for _, start, stop in slab.pieces]
        news = [new[home][(start - home) // width : (stop - home) // width] for home, start, stop in slab.pieces]
        old, changed = (x[0] if len(x) == 1 else torch.cat(x) for x in (olds, news))
        counts, chosen, nbytes, index, values = _compare(old, changed, slab)
        rows = np.zeros(len(counts), ROW)
        rows["block"], rows["index_bytes"], rows["encoding"] = slab.blocks, nbytes, chosen
        rows["changes"] = np.where(chosen == ALL, slab.sizes, counts)
        return rows[counts > 0], [index], [values]

    def _copy_to_host(self, pieces: list[Any]) -> list[Any]:
        """The same pieces, all on the host."""
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
    """The values that would be published, as flat integers."""
    values = source.detach().to(getattr(torch, entry.dtype)).contiguous().view(-1)
    return values.view(torch.uint8).view(_INTEGERS[WIDTHS[entry.dtype]])


def _slabs(spans: list[tuple[TensorEntry, int, int]], numbers: range, device: torch.device) -> Iterator[Slab]:
    """Spans cover whole blocks, or end with their tensor; `numbers` are the numbers of all their blocks."""
    pieces: list[tuple[int, int, int]] = []
    sizes: list[np.ndarray] = []
    held = width = done = 0

    def finish_slab() -> Slab:
        nonlocal pieces, sizes, held, done
        block_sizes = np.concatenate(sizes)
        which = np.arange(numbers.start, numbers.stop, numbers.step)[done : done + len(block_sizes)]
        slab = Slab(
            width=width, pieces=pieces, blocks=which, sizes=block_sizes,
            ends=torch.from_numpy(np.cumsum(block_sizes)).to(device),
        )  # fmt: skip
        pieces, sizes, held, done = [], [], 0, done + len(block_sizes)
        return slab

    for entry, start, stop in spans:
        if pieces and WIDTHS[entry.dtype] != width:
            yield finish_slab()
        width = WIDTHS[entry.dtype]
        while start < stop:
            if held and held + BLOCK > SLAB:
                yield finish_slab()
            upto = min(stop, start + max(1, (SLAB - held) // BLOCK) * BLOCK * width)
            count = (upto - start) // width
            each = np.full(-(-count // BLOCK), BLOCK, np.int64)
            each[-1] = count - BLOCK * (len(each) - 1)
            pieces.append((entry.offset, start, upto))
            sizes.append(each)
            held, start = held + count, upto
    if pieces:
        yield finish_slab()


def _compare(old: Tensor, new: Tensor, slab: Slab) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tensor, Tensor]:
    """Number of changes, encoding and index bytes of every block; all indices; all values."""
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
    chosen, nbytes = delta.choose_encodings(slab.sizes, counts, skipped, slab.width)
    total = int(nbytes.sum())
    encoding, base, filling, lengths = torch.from_numpy(
        np.stack((chosen, np.cumsum(nbytes) - nbytes, np.where(chosen == GAPS, 255, 0), nbytes))
    ).to(device)
    # One extra byte at the end, as the target of writes that belong to another encoding.
    out = torch.zeros(total + 1, dtype=torch.uint8, device=device)
    out[:total] = torch.repeat_interleave(filling.to(torch.uint8), lengths, output_size=total)
    mine, base = encoding[block], base[block]
    if (chosen == GAPS).any():
        to = base + rank + passed[1:] - passed[firsts][block]
        out[torch.where(mine == GAPS, to, total)] = (gap - 255 * skips).to(torch.uint8)
    if (chosen == POSITIONS).any():
        to = base + 2 * rank
        out[torch.where(mine == POSITIONS, to, total)] = (place & 255).to(torch.uint8)
        out[torch.where(mine == POSITIONS, to + 1, total)] = (place >> 8).to(torch.uint8)
    if (chosen == BITMAP).any():
        bits = torch.zeros(total + 1, dtype=torch.int32, device=device)
        bits.index_add_(0, torch.where(mine == BITMAP, base + (place >> 3), total), (1 << (place & 7)).int())
        out[:total] += bits[:total].to(torch.uint8)
    if (chosen == ALL).any():
        whole = torch.repeat_interleave((encoding == ALL) & (lasts > firsts), ends - starts, output_size=len(old))
        at = (changed | whole).nonzero().view(-1)
    return counts, chosen, nbytes, out[:total], new[at].view(torch.uint8)
