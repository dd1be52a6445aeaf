"""One rank's share of the delta from the previous version to the one that is being published.

    while the rows are copied     on_device   compare this rank's own blocks on its GPU, if that has room for a copy
    when they are copied          sample      compare a few own blocks, to give up early if nearly everything changed
    when all ranks have written   encode      compare the rest on the host: shared blocks, and own ones without a GPU
    when all tables are known     write       write this rank's parts of the blob to where they belong

The ranks of one machine write one blob. Its size is known before the first byte is written, from the tables of all
ranks. The blob is the same for any number of ranks. Only the early decision to give up depends slightly on that number:
blocks with rows of several ranks are not sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from windfall.weights import delta
from windfall.weights.buffers import Buffer, write_at
from windfall.weights.delta import MAX_RATIO, ROW, Blocks, Part
from windfall.weights.plan import Piece, Plan

if TYPE_CHECKING:
    import torch

WRITE_BYTES = 8 << 20  # bytes written by one call


class DeltaShare:
    def __init__(self, plan: Plan, rank: int, map_: Callable[..., Iterable[Any]], max_ratio: float = MAX_RATIO) -> None:
        """`map_`: the map of a thread pool."""
        self.max_ratio = max_ratio
        self.plan, self.rank, self.share, self.map = plan, rank, plan.shares[rank], map_
        self.blocks = Blocks(plan.ranges())
        self._parts: list[Part] = []
        self._sampled: tuple[int, int] | None = None
        self._own_done = False  # this rank's own blocks are encoded

    def on_device(self, encoder: Any, sources: Mapping[Piece, torch.Tensor]) -> None:
        """`encoder`: a DeviceDelta with the previous version."""
        self._sampled = self._sample_sizes(encoder.sample(sources))
        if self._worthwhile([self._sampled]):
            self._parts, self._own_done = encoder.encode(sources), True

    def sample(self, old: np.ndarray, new: np.ndarray) -> tuple[int, int]:
        """Encoded bytes and bytes of the sampled blocks of this rank."""
        if self._sampled is None:
            found = delta.encode_blocks(old, new, self.blocks, self._sample_numbers())
            self._sampled = self._sample_sizes([found])
        return self._sampled

    def encode(self, old: np.ndarray, new: np.ndarray, samples: Sequence[tuple[int, int]]) -> bytes:
        """The rows of the table that this rank encoded; none if the samples of all ranks say that the delta of this
        machine would be too large."""
        if not self._worthwhile([samples[rank] for rank in self.plan.members(self.rank)]):
            self._parts = []
            return b""

        def compare(numbers: Sequence[int]) -> Part:
            return delta.encode_blocks(old, new, self.blocks, numbers, self.plan.split_blocks)

        own = [] if self._own_done else [i for numbers in self.share.own_blocks for i in numbers]
        self._parts += self.map(compare, delta.runs([*own, *self.share.shared_blocks]))
        return b"".join(p.rows.tobytes() for p in self._parts)

    def sizes(self, samples: Sequence[tuple[int, int]], tables: Sequence[bytes]) -> dict[int, int]:
        """The machines that have a delta, by the rank of their leader, and the size of its blob. Every rank computes
        the same from the samples and tables of all ranks."""
        out = {}
        for leader in {share.leader for share in self.plan.shares}:
            members, whole = self.plan.members(leader), self._rows_bytes(leader)
            size = sum(self.blocks.size(np.frombuffer(tables[rank], ROW)) for rank in members)
            if whole and self._worthwhile([samples[rank] for rank in members]) and self._worthwhile([(size, whole)]):
                out[leader] = size + delta.HEAD_BYTES
        return out

    def update_bytes(self, sizes: Mapping[int, int]) -> int:
        """Bytes of an update: the delta of every machine in `sizes`, and all rows of every other machine."""
        leaders = {share.leader for share in self.plan.shares}
        return sum(sizes[leader] if leader in sizes else self._rows_bytes(leader) for leader in leaders)

    def _rows_bytes(self, leader: int) -> int:
        return sum(stop - start for start, stop in self.plan.parts(leader))

    def write(self, target: Buffer, tables: Sequence[bytes]) -> None:
        """Write this rank's part of the blob of its machine. The leader also writes the table."""
        others = [rank for rank in self.plan.members(self.rank) if rank != self.rank]
        known = [np.frombuffer(tables[rank], ROW) for rank in others]
        head, nbytes, places = delta.arrange([*known, *(p.rows for p in self._parts)], self.blocks)
        assert nbytes == target.nbytes
        writes = [w for part, place in zip(self._parts, places[len(known) :], strict=True) for w in place.writes(part)]
        if self.rank == self.share.leader:
            writes.append((0, memoryview(head)))
        pieces = [(at + i, data[i : i + WRITE_BYTES]) for at, data in writes for i in range(0, len(data), WRITE_BYTES)]
        # Write through the descriptor: the kernel writes to a file faster than it maps new pages of it.
        list(self.map(lambda piece: write_at(target.fd, *piece), pieces))
        self._parts = []

    def _sample_numbers(self) -> list[int]:
        return [i for numbers in self.share.own_blocks for i in delta.sampled(numbers, len(self.blocks))]

    def _sample_sizes(self, found: Sequence[Part]) -> tuple[int, int]:
        nbytes = sum(self.blocks[i].stop - self.blocks[i].start for i in self._sample_numbers())
        return sum(self.blocks.size(part.rows) for part in found), nbytes

    def _worthwhile(self, sizes: Sequence[tuple[int, int]]) -> bool:
        return sum(encoded for encoded, _ in sizes) <= self.max_ratio * sum(nbytes for _, nbytes in sizes)
