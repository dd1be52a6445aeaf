"""Publishes versions of the weights, which workers can pull while training continues.

    trainer                                                        worker
    state_dict ──▶ row_writer ──▶ Buffer (buffers) ──▶ serve ── HTTP ──▶ download ──▶ pull ──▶ engine
                       │               │ hash             ▲ sendfile       verify        ▲
                       │               ▼                  │                              │
                       │            Manifest (manifest) ──┤                              │
                       └──▶ delta ──▶ delta Buffer ───────┘                delta.apply ──┘

There are two buffers. `publish` writes into the one that is not current and makes it current in one assignment, so that
a reader sees the old version or the new one, never a mixture. Rules:

- two versions are readable: the current one, and the previous one until `publish` needs its buffer. The previous
  version is withdrawn before its first byte is overwritten, without waiting for its readers: they notice by status or
  checksum;
- a tensor is written once, even if it has several names;
- the delta from the previous version is part of a version: both become readable together;
- the base of adapters is readable as long as the publisher is open.

`publish` may run in a thread alongside the event loop that serves: writing, hashing and comparing release the GIL.

Several ranks, each with some rows of every tensor, publish together. All call `publish` at the same time, and no rank
ever has the whole model (plan.py says who does what, meeting.py what happens if a rank fails). They take the same
steps together: describe their tensors, prepare the buffer, write their rows, hash the chunks, and, if there is a delta,
write it. Then every rank has all checksums, and makes the same manifest.

On one machine all ranks write to the two buffers of rank 0, which serves them. Another machine has buffers of its own,
with memory only for its own rows, and its first rank serves these. The manifest, which rank 0 serves, says which bytes
are where.

On several machines, a version becomes readable on rank 0 after it is readable on all others.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from windfall.errors import WindfallError
from windfall.weights import manifest
from windfall.weights import plan as plans
from windfall.weights.buffers import Buffer, BufferHandle, machine, write_at
from windfall.weights.delta import MAX_RATIO, part
from windfall.weights.manifest import DeltaManifest, Manifest
from windfall.weights.meeting import Meeting, OneRank, PublishRanks
from windfall.weights.plan import HeldRows, Piece, PublishPlan, RankOffer
from windfall.weights.source import Published

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
MAX_THREADS = 8


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankRows:
    """The rows of a tensor that this rank holds."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int = 0


Tensors = Mapping[str, "torch.Tensor | RankRows"]
PieceValues = Mapping[Piece, "torch.Tensor"]


class Publisher:
    def __init__(
        self,
        folder: Path | None = None,
        *,
        dtype: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        ranks: PublishRanks | None = None,
        on_machine: str | None = None,
        read_here: bool = False,
    ) -> None:
        """`dtype`: of published floating-point tensors; None: as they are. `ranks`: the processes that publish
        together, each with a publisher of its own. `on_machine`: equal for ranks that can share memory; None: find
        out. `read_here`: the GPU of this process also reads what other ranks publish."""
        if dtype is not None:
            manifest.width(dtype, "all")
        self.folder = folder
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self.ranks = ranks or OneRank()
        self.address = ""
        """Where this rank's weight server can be reached. The first rank of every machine but that of rank 0 must set
        it before `publish`."""
        self.readable: tuple[Published, ...] = ()  # newest first; replaced as a whole, so any thread may read it
        self.base: Published | None = None  # of adapters
        self._machine = machine() if on_machine is None else on_machine
        self._read_here = read_here
        self._planned: tuple[list[RankOffer], PublishPlan] | None = None  # the last plan, and what it was made from
        self._spare: tuple[Buffer, PublishPlan] | None = None  # the buffer that is not readable, and its layout
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="publish")
        self._closed = False

    @property
    def current(self) -> Manifest | None:
        return self.readable[0].manifest if self.readable else None

    def find(self, version: int) -> Published | None:
        return next((p for p in self.readable if p.manifest.version == version), None)

    def is_readable(self, published: Published) -> bool:
        return published in self.readable or published is self.base

    def publish(
        self,
        version: int,
        tensors: Tensors,
        *,
        copied: Callable[[], None] | None = None,
        base: str = "",
        scale: float = 1.0,
    ) -> Manifest:
        """The version can be pulled when this returns. `copied` is called once the tensors of this rank may change
        again. `base`: the digest from `publish_base`, if the tensors are an adapter, which is added times `scale`."""

        def check() -> int:
            current = self.current
            if current and version <= current.version:
                what = f"version {version} is not newer than {current.version}"
                raise WindfallError(what, where="weights", fix="Publish versions in rising order.")
            if base and (self.base is None or self.base.manifest.digest != base):
                what = f"the base {base} of the adapter is not published"
                raise WindfallError(what, where=f"version {version}", fix="Call publish_base first.")
            return version

        with self._lock, ExitStack() as undo:
            meeting = Meeting(self.ranks, f"version {version}")
            plan, values = self._agree(meeting, tensors, check)
            fields = {"base": base, "scale": scale} if base else {}
            old = self.readable[0] if self.readable and self.readable[0].plan == plan else None
            published = self._write(meeting, plan, values, undo, old=old, copied=copied, version=version, **fields)
            self._make_readable(meeting, published)
            undo.pop_all()
            return published.manifest

    def publish_base(self, tensors: Tensors) -> Manifest:
        """Publish the weights that adapters apply to. They stay readable as long as the publisher is open."""

        def check() -> int:
            if self.base is not None:
                raise WindfallError("the base of adapters is already published", where="weights")
            return -1  # no version

        with self._lock, ExitStack() as undo:
            meeting = Meeting(self.ranks, "the base of adapters")
            plan, values = self._agree(meeting, tensors, check)
            self.base, self._spare = self._write(meeting, plan, values, undo, version=0), None
            undo.pop_all()
            return self.base.manifest

    def close(self) -> None:
        """Withdraw all versions. Responses in progress are reset before their next piece."""
        with self._lock:
            withdrawn = (*self.readable, *((self.base,) if self.base else ()))
            self.readable, self.base, self._closed = (), None, True
            for p in withdrawn:
                p.buffer.close()
                if p.delta_buffer:
                    p.delta_buffer.close()
            self._drop_spare()
            self._threads.shutdown()

    def _agree(self, meeting: Meeting, tensors: Tensors, check: Callable[[], int]) -> tuple[PublishPlan, PieceValues]:
        """The plan of all ranks, and the rows that this one writes. `check` returns a number that must be the same on
        all ranks."""
        values: dict[str, torch.Tensor] = {}

        def announce() -> tuple[int, RankOffer]:
            nonlocal values
            if self._closed:
                raise WindfallError("the weight publisher is closed", where=meeting.subject)
            number = check()
            rows, values = describe(tensors, self.dtype)
            return number, RankOffer(
                machine=self._machine, address=self.address, chunk_bytes=self.chunk_bytes, tensors=rows
            )

        said = meeting.step("describe their tensors", announce)
        for rank, (number, _) in enumerate(said):
            if number != said[0][0]:
                what = f"rank {rank} publishes version {number}, rank 0 version {said[0][0]} (-1: the base of adapters)"
                raise WindfallError(what, where="weights", fix="Publish the same versions on all ranks.")
        offers = [offer for _, offer in said]
        if self._planned is None or self._planned[0] != offers:
            self._planned = offers, plans.make(offers)
        plan = self._planned[1]
        return plan, {p: values[p.entry.name] for p in plan.shares[self.ranks.rank].pieces}

    def _write(
        self,
        meeting: Meeting,
        plan: PublishPlan,
        values: PieceValues,
        undo: ExitStack,
        *,
        old: Published | None = None,
        copied: Callable[[], None] | None = None,
        **fields: Any,
    ) -> Published:
        """Write a version into the spare buffer. `old`: the version to compare with. `fields`: of the manifest. `undo`
        is extended by what must be done if the version does not become readable."""
        leader, rank = plan.shares[self.ranks.rank].leader, self.ranks.rank
        alone = len(plan.members(rank)) == 1
        buffer: Any = None
        stored: Buffer | None = None
        delta: list[memoryview] = []
        checksums: dict[int, int] = {}

        def prepare() -> tuple[BufferHandle | None, str]:
            self._withdraw_older()
            if self._spare and self._spare[1] != plan:
                self._drop_spare()
            if leader == rank and self._spare is None:
                used = plan.parts(rank) if plan.sources else None
                self._spare = Buffer(plan.nbytes, self.folder, used=used), plan
            return self._spare[0].handle if leader == rank and self._spare else None, old.manifest.digest if old else ""

        def hash_chunk(i: int) -> None:
            checksums[i] = _checksum(buffer, plan.bounds[i], plan.bounds[i + 1])

        def written(start: int, stop: int) -> None:
            if alone:  # otherwise a chunk may have rows of other ranks
                for i in range(bisect_left(plan.bounds, start), bisect_right(plan.bounds, stop) - 1):
                    hash_chunk(i)

        def write_rows() -> int:
            """Returns the bytes of this rank in the delta; -1: none."""
            nonlocal buffer, delta
            from windfall.weights import row_writer

            assert handle is not None
            if self._spare is None or self._spare[0].handle != handle:
                self._drop_spare()
                self._spare = Buffer.map(handle), plan
            buffer = self._spare[0]
            if self._read_here and any(value.is_cuda for value in values.values()):
                buffer.lock([(0, buffer.nbytes)])
            changes = row_writer.write(buffer, values, old.buffer if old else None, written)
            if copied:
                copied()
            if changes is None:
                return -1
            delta = part(changes)
            return sum(map(len, delta))

        def hash_and_reserve() -> tuple[dict[int, int], BufferHandle | None]:
            nonlocal stored
            if rank != leader:
                return {}, None
            list(self._threads.map(hash_chunk, [i for i in plan.chunks(rank) if i not in checksums]))
            if rank in deltas:
                stored = Buffer(sum(deltas[rank]), self.folder)
                undo.callback(stored.close)
            return checksums, stored and stored.handle

        def write_delta() -> None:
            if delta_handle is None:
                return
            target = stored or Buffer.map(delta_handle)
            at = sum(deltas[leader][: plan.members(rank).index(rank)])
            # Write through the descriptor: the kernel writes to a file faster than it maps new pages of it.
            starts = accumulate(map(len, delta), initial=at)
            list(self._threads.map(partial(write_at, target.fd), starts, delta))
            if target is not stored:
                target.close()

        prepared = meeting.step("prepare the buffer", prepare)
        handle = prepared[leader][0]
        old = old if len({digest for _, digest in prepared}) == 1 else None  # else a rank does not have it
        deltas = _delta_sizes(plan, meeting.step("write their rows", write_rows))
        hashed = meeting.step("hash the chunks", hash_and_reserve)
        found = {i: checksum for mine, _ in hashed for i, checksum in mine.items()}
        made = manifest.make(
            entries=plan.entries,
            nbytes=plan.nbytes,
            chunk_bytes=self.chunk_bytes,
            servers=plan.servers,
            sources=plan.sources,
            chunks=tuple(found[i] for i in range(len(plan.bounds) - 1)),
            **fields,
        )
        leaders = {share.leader for share in plan.shares}
        update_bytes = sum(sum(deltas[x]) if x in deltas else plan.part_bytes(x) for x in leaders)
        published = Published(manifest=made, buffer=buffer, plan=plan, update_bytes=update_bytes)
        if old is None or not deltas:
            return published
        delta_handle = hashed[leader][1]
        meeting.step("write the delta", write_delta)
        return published if stored is None else self._with_delta(published, old, stored)

    def _with_delta(self, published: Published, old: Published, stored: Buffer) -> Published:
        bounds = manifest.chunk_bounds(stored.nbytes, self.chunk_bytes)
        made = DeltaManifest(
            base=old.manifest.digest,
            digest=published.manifest.digest,
            nbytes=stored.nbytes,
            chunk_bytes=self.chunk_bytes,
            chunks=tuple(self._threads.map(lambda chunk: _checksum(stored, *chunk), pairwise(bounds))),
        )
        return replace(published, delta=made, delta_buffer=stored)

    def _make_readable(self, meeting: Meeting, published: Published) -> None:
        """On rank 0 last: workers get the manifest from there."""

        def switch() -> None:
            self.readable, self._spare = (published, *self.readable[:1]), None

        if published.plan.sources:
            meeting.step("make the version readable", lambda: switch() if self.ranks.rank else None)
        if self.ranks.rank == 0 or not published.plan.sources:
            switch()

    def _withdraw_older(self) -> None:
        """Make the buffer of the older version the spare one."""
        if len(self.readable) == 2:
            older, self.readable = self.readable[1], self.readable[:1]
            self._spare = older.buffer, older.plan
            if older.delta_buffer:
                older.delta_buffer.close()

    def _drop_spare(self) -> None:
        if self._spare:
            self._spare[0].close()
        self._spare = None


def _checksum(buffer: Buffer, start: int, stop: int) -> int:
    return xxhash.xxh3_64_intdigest(buffer.data[start:stop].data)


def _delta_sizes(plan: PublishPlan, sizes: Sequence[int]) -> dict[int, list[int]]:
    """The bytes of each rank in the delta of its machine, by the leaders of the machines that have one. `sizes`: of
    all ranks; -1: none."""
    out = {}
    for leader in {share.leader for share in plan.shares}:
        found = [sizes[rank] for rank in plan.members(leader)]
        whole = plan.part_bytes(leader)
        if whole and min(found) >= 0 and sum(found) <= MAX_RATIO * whole:
            out[leader] = found
    return out


def describe(tensors: Tensors, dtype: str | None) -> tuple[tuple[HeldRows, ...], dict[str, torch.Tensor]]:
    """The rows for an offer, and the rows' values by name. `dtype`: the published dtype of floating-point tensors."""
    import torch

    if not tensors:
        raise WindfallError("no tensors to publish", where="weights", fix="Pass the state_dict() of the module.")
    rows, values, storages = [], {}, {}
    for name, tensor in tensors.items():
        whole = isinstance(tensor, torch.Tensor)
        t, first = (tensor, 0) if whole else (tensor.local, tensor.first_row)
        if t.is_meta:
            raise WindfallError(f"tensor {name!r} has no values", where="weights", fix="Load the model first.")
        published = dtype if dtype and t.is_floating_point() else str(t.dtype).removeprefix("torch.")
        identity = (t.data_ptr(), t.dtype, t.shape, t.stride(), t.device)
        storage = storages.setdefault(identity, len(storages)) if t.numel() else -1
        held = (len(t) if t.dim() else 1) if t.numel() else 0
        shape = tuple(tensor.shape)
        rows.append(HeldRows(name=name, dtype=published, shape=shape, storage=storage, first=first, count=held))
        values[name] = t.detach()
    return tuple(rows), values
