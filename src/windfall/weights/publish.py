"""Publishes versions of the weights, which workers can pull while training continues.

    trainer                                                        worker
    state_dict ──▶ copy ──▶ Buffer (buffers) ──▶ serve ── HTTP ──▶ download ──▶ pull ──▶ engine
        │                          │ hash               ▲ sendfile        verify     ▲
        │                          ▼                    │                            │
        │                       Manifest (manifest) ────┤                            │
        └──▶ delta_encoder ──▶ delta Buffer ────────────┘              delta.apply ──┘

There are two buffers. `publish` writes into the one that is not current and makes it current in one assignment, so that
a reader sees the old version or the new one, never a mixture. Rules:

- two versions are readable: the current one, and the previous one until `publish` needs its buffer. The previous
  version is withdrawn before its first byte is overwritten, without waiting for its readers: they notice by status or
  checksum;
- a tensor is written once, even if it has several names;
- the delta from the previous version is part of a version: both become readable together;
- the base of adapters is readable as long as the publisher is open.

Bytes are copied from a GPU on a separate stream, and meanwhile the delta is computed on that GPU; on a CPU the two
buffers are compared after the copy. The tensors may change again once the last byte has been copied; hashing continues.

`publish` may run in a thread alongside the event loop that serves: copying, hashing and comparing release the GIL.

Several ranks, each with some rows of every tensor, publish together. All call `publish` at the same time, and no rank
ever has the whole model (plan.py says who does what, meeting.py what happens if a rank fails). They take the same
steps together: describe their tensors, prepare the buffer, write their rows, hash their chunks, and, if there is a
delta, prepare its buffer and write it. Then every rank has the checksums of all, and makes the same manifest.

On one machine all ranks write to the two buffers of rank 0, which serves them. Another machine has buffers of its own,
with memory only for its own rows, and its first rank serves these. The manifest, which rank 0 serves, says which bytes
are where.

On several machines, a version becomes readable on rank 0 after it is readable on all others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from windfall.errors import WindfallError
from windfall.weights import buffers, manifest
from windfall.weights import plan as plans
from windfall.weights.buffers import Buffer, BufferHandle, machine, write_at
from windfall.weights.delta import MAX_RATIO
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
        out. `read_here`: the GPU of this process also reads what is published."""
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
        self._offer: RankOffer | None = None  # of this rank, for the last plan
        self._plan: PublishPlan | None = None
        self._spare: tuple[Buffer, PublishPlan] | None = None  # the buffer that is not readable, and its layout
        self._lock = threading.Lock()
        self._pages = buffers.LockedPages(whole=read_here)
        threads = min(MAX_THREADS, max(1, (os.cpu_count() or 1) // self.ranks.size))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="publish")
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
                self._drop(p.buffer)
                if p.delta_buffer:
                    p.delta_buffer.close()
            self._drop_spare()
            self._threads.shutdown()

    def _agree(self, meeting: Meeting, tensors: Tensors, check: Callable[[], int]) -> tuple[PublishPlan, PieceValues]:
        """The plan of all ranks, and the rows that this one writes. If no rank's offer changed since the last version,
        the plan has not changed either. `check` returns a number that must be the same on all ranks."""
        offer, values = None, {}

        def announce() -> tuple[int, bool]:
            nonlocal offer, values
            if self._closed:
                raise WindfallError("the weight publisher is closed", where=meeting.subject)
            number = check()
            rows, values = describe(tensors, self.dtype)
            offer = RankOffer(machine=self._machine, address=self.address, chunk_bytes=self.chunk_bytes, tensors=rows)
            return number, offer == self._offer

        doing = "describe their tensors"
        said = meeting.step(doing, announce)
        for rank, (number, _) in enumerate(said):
            if number != said[0][0]:
                what = f"rank {rank} publishes version {number}, rank 0 version {said[0][0]} (-1: the base of adapters)"
                raise WindfallError(what, where="weights", fix="Publish the same versions on all ranks.")
        if not all(unchanged for _, unchanged in said):
            self._offer = None
            self._plan = plans.make([o for o in meeting.step(doing, lambda: offer) if o is not None])
            self._offer = offer
        assert self._plan is not None
        return self._plan, {p: values[p.entry.name] for p in self._plan.shares[self.ranks.rank].pieces}

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
        buffer: Any = None
        delta: list[memoryview] | None = None

        def prepare() -> tuple[BufferHandle | None, str]:
            self._withdraw_older()
            if self._spare and self._spare[1] != plan:
                self._drop_spare()
            if leader == rank and self._spare is None:
                used = plan.parts(rank) if plan.sources else None
                self._spare = Buffer(plan.nbytes, self.folder, used=used), plan
            return self._spare[0].handle if leader == rank and self._spare else None, old.manifest.digest if old else ""

        said = meeting.step("prepare the buffer", prepare)
        handle = said[leader][0]
        assert handle is not None
        old = old if len({digest for _, digest in said}) == 1 else None  # else a rank does not have it

        def write_rows() -> None:
            nonlocal buffer, delta
            if self._spare is None or self._spare[0].handle != handle:
                self._drop_spare()
                self._spare = Buffer.map(handle), plan
            buffer = self._spare[0]
            after = buffers.ready_event(values.values())
            copying = self._threads.submit(buffers.copy, buffer, values, after, self._pages)
            try:
                delta = _encode(old, values) if old and after else None
            finally:
                copying.result()
            if copied:
                copied()

        def hash_and_compare() -> tuple[list[int], int]:
            nonlocal delta
            checksums = self._hashes(buffer.data, plan.bounds, plan.shares[rank].chunks)
            if old and delta is None:
                delta = _encode(old, {p: buffers.target(buffer, p) for p in values})
            return checksums, -1 if delta is None else sum(map(len, delta))

        meeting.step("write their rows", write_rows)
        done = meeting.step("hash their chunks", hash_and_compare)
        made = manifest.make(
            entries=plan.entries,
            nbytes=plan.nbytes,
            chunk_bytes=self.chunk_bytes,
            servers=plan.servers,
            sources=plan.sources,
            chunks=_in_order(plan, [checksums for checksums, _ in done]),
            **fields,
        )
        deltas = _delta_sizes(plan, [size for _, size in done])
        leaders = {share.leader for share in plan.shares}
        update_bytes = sum(sum(deltas[x]) if x in deltas else plan.part_bytes(x) for x in leaders)
        published = Published(manifest=made, buffer=buffer, plan=plan, update_bytes=update_bytes)
        if old is None or not deltas:
            return published
        stored = self._store_delta(meeting, plan, deltas, delta or [], undo)
        return published if stored is None else self._with_delta(published, old, stored)

    def _store_delta(
        self,
        meeting: Meeting,
        plan: PublishPlan,
        deltas: Mapping[int, Sequence[int]],
        mine: Sequence[memoryview],
        undo: ExitStack,
    ) -> Buffer | None:
        """The buffer with the delta of this machine, on its leader."""
        rank, leader, stored = self.ranks.rank, plan.shares[self.ranks.rank].leader, None

        def reserve() -> BufferHandle | None:
            nonlocal stored
            if rank != leader or leader not in deltas:
                return None
            stored = Buffer(sum(deltas[leader]), self.folder)
            undo.callback(stored.close)
            return stored.handle

        handle = meeting.step("prepare the delta's buffer", reserve)[leader]

        def write() -> None:
            if handle is None:
                return
            target = stored or Buffer.map(handle)
            at = sum(deltas[leader][: plan.members(rank).index(rank)])
            # Write through the descriptor: the kernel writes to a file faster than it maps new pages of it.
            for start, data in zip(accumulate(map(len, mine), initial=at), mine, strict=False):
                write_at(target.fd, start, data)
            if target is not stored:
                target.close()

        meeting.step("write the delta", write)
        return stored

    def _with_delta(self, published: Published, old: Published, stored: Buffer) -> Published:
        bounds = manifest.chunk_bounds(stored.nbytes, self.chunk_bytes)
        made = DeltaManifest(
            base=old.manifest.digest,
            digest=published.manifest.digest,
            nbytes=stored.nbytes,
            chunk_bytes=self.chunk_bytes,
            chunks=tuple(self._hashes(stored.data, bounds, range(len(bounds) - 1))),
        )
        return replace(published, delta=made, delta_buffer=stored)

    def _hashes(self, data: np.ndarray, bounds: Sequence[int], which: Sequence[int]) -> list[int]:
        hashed = self._threads.map(lambda i: xxhash.xxh3_64_intdigest(data[bounds[i] : bounds[i + 1]].data), which)
        return list(hashed)

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
            self._drop(self._spare[0])
        self._spare = None

    def _drop(self, buffer: Buffer) -> None:
        self._pages.unlock(buffer)
        buffer.close()


def _encode(old: Published, values: PieceValues) -> list[memoryview] | None:
    """This rank's parts of the delta; None if nearly everything has changed, or a GPU has no memory left."""
    import torch

    from windfall.weights import delta_encoder

    try:
        parts = delta_encoder.encode(old.buffer.data, values)
    except torch.OutOfMemoryError:  # the caller compares on the host
        return None
    return None if parts is None else [data for part in parts for data in part.buffers()]


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


def _in_order(plan: PublishPlan, checksums: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The checksums of all chunks, from those of each rank."""
    out = [0] * (len(plan.bounds) - 1)
    for share, found in zip(plan.shares, checksums, strict=True):
        for i, checksum in zip(share.chunks, found, strict=True):
            out[i] = checksum
    return tuple(out)


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
