"""One rank's share of the delta from the previous version to the one that is being published.

    while the rows are copied     on_device   compare this rank's own blocks on its GPU, if that has room for a copy
    when all ranks have written   encode      compare the rest on the host: shared blocks, and own ones without a GPU
    when all tables are known     write       write this rank's parts of the blob to where they belong

A rank first compares a sample of its own blocks. If nearly everything has changed, it gives up, and its machine has no
delta. The ranks of one machine write one blob. Its size is known before the first byte is written, from the tables of
all ranks. The blob is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from windfall.weights import delta
from windfall.weights.buffers import Buffer, write_at
from windfall.weights.delta import MAX_RATIO, ROW, DeltaBlocks, EncodedBlocks
from windfall.weights.plan import Piece, PublishPlan

if TYPE_CHECKING:
    import torch

WRITE_BYTES = 8 << 20  # bytes written by one call


class DeltaShare:
    def __init__(
        self, plan: PublishPlan, rank: int, map_: Callable[..., Iterable[Any]], max_ratio: float = MAX_RATIO
    ) -> None:
        """`map_`: the map of a thread pool."""
        self.plan = plan
        self.rank = rank
        self.share = plan.shares[rank]
        self.map = map_
        self.max_ratio = max_ratio
        self.blocks = DeltaBlocks(plan.ranges())
        self._parts: list[EncodedBlocks] | None = None
        """This rank's own blocks, once they are encoded on the device."""
        self._gave_up = False

    def on_device(self, encoder: Any, sources: Mapping[Piece, torch.Tensor]) -> None:
        """`encoder`: a DeviceDelta with the previous version."""
        self._gave_up = not self._sample_is_small(encoder.sample(sources))
        if not self._gave_up:
            self._parts = encoder.encode(sources)

    def encode(self, old: np.ndarray, new: np.ndarray) -> bytes | None:
        """The rows of the table that this rank encoded; None if it gave up."""

        def compare(numbers: Sequence[int]) -> EncodedBlocks:
            return delta.encode_blocks(old, new, self.blocks, numbers)

        own: list[int] = []
        if self._parts is None and not self._gave_up:
            self._gave_up = not self._sample_is_small([compare(self._sample_numbers())])
            own = [i for numbers in self.share.own_blocks for i in numbers]
        if self._gave_up:
            return None
        self._parts = [*(self._parts or ()), *self.map(compare, delta.runs([*own, *self.share.shared_blocks]))]
        return b"".join(p.rows.tobytes() for p in self._parts)

    def sizes(self, tables: Sequence[bytes | None]) -> dict[int, int]:
        """The machines that have a delta, by the rank of their leader, and the size of its blob. Every rank computes
        the same from the tables of all ranks."""
        out = {}
        for leader in {share.leader for share in self.plan.shares}:
            found = [tables[rank] for rank in self.plan.members(leader)]
            known = [table for table in found if table is not None]
            size = sum(self.blocks.size(np.frombuffer(table, ROW)) for table in known)
            whole = self._rows_bytes(leader)
            if whole and len(known) == len(found) and size <= self.max_ratio * whole:
                out[leader] = size + delta.HEAD_BYTES
        return out

    def update_bytes(self, sizes: Mapping[int, int]) -> int:
        """Bytes of an update: the delta of every machine in `sizes`, and all rows of every other machine."""
        leaders = {share.leader for share in self.plan.shares}
        return sum(sizes[leader] if leader in sizes else self._rows_bytes(leader) for leader in leaders)

    def _rows_bytes(self, leader: int) -> int:
        return sum(stop - start for start, stop in self.plan.parts(leader))

    def write(self, target: Buffer, tables: Sequence[bytes | None]) -> None:
        """Write this rank's part of the blob of its machine. The leader also writes the table."""
        others = [tables[rank] for rank in self.plan.members(self.rank) if rank != self.rank]
        known = [np.frombuffer(table, ROW) for table in others if table is not None]
        parts = self._parts or []
        head, nbytes, places = delta.arrange([*known, *(p.rows for p in parts)], self.blocks)
        assert nbytes == target.nbytes
        writes = [w for part, place in zip(parts, places[len(known) :], strict=True) for w in place.writes(part)]
        if self.rank == self.share.leader:
            writes.append((0, memoryview(head)))
        pieces = [(at + i, data[i : i + WRITE_BYTES]) for at, data in writes for i in range(0, len(data), WRITE_BYTES)]
        # Write through the descriptor: the kernel writes to a file faster than it maps new pages of it.
        list(self.map(lambda piece: write_at(target.fd, *piece), pieces))
        self._parts = None

    def _sample_numbers(self) -> list[int]:
        return [i for numbers in self.share.own_blocks for i in delta.sampled(numbers, len(self.blocks))]

    def _sample_is_small(self, found: Sequence[EncodedBlocks]) -> bool:
        nbytes = sum(self.blocks[i].stop - self.blocks[i].start for i in self._sample_numbers())
        return sum(self.blocks.size(part.rows) for part in found) <= self.max_ratio * nbytes
