"""Computes the delta from one version of the weights to the next on the device that holds the weights.

A DeviceDelta keeps a copy of the rank's rows of the last published version on that device: as many bytes as are
published, 2 per bfloat16 parameter. It compares the new rows with this copy, and only positions and values of changed
elements cross the bus. Every block is encoded as by delta.encode_blocks, bit for bit. A block with rows of several
ranks is not encoded here, but on the host. A DeviceDelta works on slabs of about SLAB elements, so in addition to the
copy it briefly needs up to about 80 bytes for every changed element of a slab. It is plain torch and also runs on a
CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from windfall.free_memory import free_bytes
from windfall.weights import delta
from windfall.weights.delta import BITMAP, BLOCK, GAPS, POSITIONS, ROW, DeltaBlocks, EncodedBlocks
from windfall.weights.manifest import WIDTHS, TensorEntry
from windfall.weights.plan import Piece, PublishPlan, Share

SLAB = 1 << 27
MAX_MEMORY_SHARE = 0.2  # share of the device's free memory that the copy may take
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fits(nbytes: int, device: torch.device) -> bool:
    """Whether the device has room for a copy of `nbytes`."""
    return device.type == "cuda" and nbytes <= MAX_MEMORY_SHARE * free_bytes(device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slab:
    """Blocks that are compared at once. They cover consecutive pieces of tensors with elements of one width."""

    width: int
    pieces: list[tuple[Piece, int, int]]  # a rank's rows, and which of their bytes (first and end, in the buffer)
    blocks: np.ndarray  # numbers of the blocks
    sizes: np.ndarray  # elements of each block
    ends: Tensor  # cumulative sum of `sizes`, on the device


class DeviceDelta:
    def __init__(self, plan: PublishPlan, rank: int, device: torch.device) -> None:
        self.plan, self.device = plan, device
        self.version: int | None = None  # version that the copy holds; None if it holds no complete version
        share = plan.shares[rank]
        # Every piece starts at a multiple of 8 bytes, so that it can be viewed as integers of any width.
        starts = np.cumsum([0, *(-(-(p.stop - p.start) // 8) * 8 for p in share.pieces)])
        self._at = {p: int(start) - p.start for p, start in zip(share.pieces, starts, strict=False)}
        self._flat = torch.zeros(int(starts[-1]), dtype=torch.uint8, device=device)
        blocks = DeltaBlocks(plan.ranges())
        self._slabs = list(_slabs(_spans(share, blocks, sampled=False), device))
        self._sample = list(_slabs(_spans(share, blocks, sampled=True), device))
        self._host = torch.empty(0, dtype=torch.uint8)  # pinned memory for the bytes that cross the bus; reused

    def store(self, sources: Mapping[Piece, Tensor], version: int) -> None:
        """Copy this version, as the base of the next delta."""
        self.version = None
        for piece, source in sources.items():
            target = self._copy(piece, piece.start, piece.stop)
            target.view(getattr(torch, piece.entry.dtype)).view(source.shape).copy_(source.detach())
        self.version = version

    def sample(self, sources: Mapping[Piece, Tensor]) -> list[EncodedBlocks]:
        """The sampled blocks, encoded. Their bytes are still on the device."""
        return [self._part(slab, sources) for slab in self._sample]

    def encode(self, sources: Mapping[Piece, Tensor]) -> list[EncodedBlocks]:
        """All blocks of this rank, encoded, on the host. The parts are valid until the next call."""
        return self._copy_to_host([self._part(slab, sources) for slab in self._slabs])

    def _copy(self, piece: Piece, start: int, stop: int) -> Tensor:
        at = self._at[piece]
        return self._flat[start + at : stop + at]

    def _part(self, slab: Slab, sources: Mapping[Piece, Tensor]) -> EncodedBlocks:
        kind, width = _INTEGERS[slab.width], slab.width
        olds = [self._copy(*piece).view(kind) for piece in slab.pieces]
        news = [
            _integers(p.entry, sources[p].detach().reshape(-1)[(start - p.start) // width : (stop - p.start) // width])
            for p, start, stop in slab.pieces
        ]
        old, changed = (x[0] if len(x) == 1 else torch.cat(x) for x in (olds, news))
        counts, chosen, nbytes, index, values = _compare(old, changed, slab)
        rows = np.zeros(len(counts), ROW)
        rows["block"], rows["index_bytes"], rows["encoding"] = slab.blocks, nbytes, chosen
        rows["changes"] = counts
        return EncodedBlocks(rows[counts > 0], index, values)

    def _copy_to_host(self, parts: list[EncodedBlocks]) -> list[EncodedBlocks]:
        if self.device.type != "cuda":
            return [EncodedBlocks(p.rows, p.index.numpy(), p.values.numpy()) for p in parts]
        nbytes, at = sum(len(p.index) + len(p.values) for p in parts), 0
        if nbytes > len(self._host):
            self._host = torch.empty(nbytes + nbytes // 4, dtype=torch.uint8, pin_memory=True)
        out = []
        for p in parts:
            placed = []
            for data in (p.index, p.values):
                self._host[at : at + len(data)].copy_(data, non_blocking=True)
                placed.append(self._host[at : at + len(data)].numpy())
                at += len(data)
            out.append(EncodedBlocks(p.rows, *placed))
        torch.cuda.current_stream(self.device).synchronize()
        return out


def _spans(share: Share, blocks: DeltaBlocks, *, sampled: bool) -> Iterator[tuple[Piece, int, int, range]]:
    """For every piece, the bytes that are whole blocks, and the numbers of these blocks. `sampled`: only the sampled
    blocks, one at a time."""
    for piece, own in zip(share.pieces, share.own_blocks, strict=True):
        chosen = [range(i, i + 1) for i in delta.sampled(own, len(blocks))] if sampled else [own]
        for numbers in filter(None, chosen):
            yield piece, blocks[numbers[0]].start, blocks[numbers[-1]].stop, numbers


def _integers(entry: TensorEntry, values: Tensor) -> Tensor:
    """The values that would be published, as integers."""
    published = values.to(getattr(torch, entry.dtype)).contiguous()
    return published.view(torch.uint8).view(_INTEGERS[WIDTHS[entry.dtype]])


def _slabs(spans: Iterable[tuple[Piece, int, int, range]], device: torch.device) -> Iterator[Slab]:
    pieces: list[tuple[Piece, int, int]] = []
    sizes: list[np.ndarray] = []
    blocks: list[np.ndarray] = []
    held = width = 0

    def finish_slab() -> Slab:
        nonlocal pieces, sizes, blocks, held
        block_sizes = np.concatenate(sizes)
        slab = Slab(
            width=width,
            pieces=pieces,
            blocks=np.concatenate(blocks),
            sizes=block_sizes,
            ends=torch.from_numpy(np.cumsum(block_sizes)).to(device),
        )
        pieces, sizes, blocks, held = [], [], [], 0
        return slab

    for piece, start, stop, numbers in spans:
        if pieces and WIDTHS[piece.entry.dtype] != width:
            yield finish_slab()
        width = WIDTHS[piece.entry.dtype]
        done = 0
        while start < stop:
            if held and held + BLOCK > SLAB:
                yield finish_slab()
            upto = min(stop, start + max(1, (SLAB - held) // BLOCK) * BLOCK * width)
            count = (upto - start) // width
            each = np.full(-(-count // BLOCK), BLOCK, np.int64)
            each[-1] = count - BLOCK * (len(each) - 1)
            pieces.append((piece, start, upto))
            sizes.append(each)
            blocks.append(np.arange(numbers[done], numbers[done] + len(each)))
            held, start, done = held + count, upto, done + len(each)
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
    chosen, nbytes = delta.choose_encodings(slab.sizes, counts, skipped)
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
    return counts, chosen, nbytes, out[:total], new[at].view(torch.uint8)
