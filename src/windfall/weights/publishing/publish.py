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
  checksum. One that is being uploaded to a bucket stays as it is; `publish` takes a third buffer then;
- a tensor is written once, even if it has several names;
- the delta from the previous version is part of a version: both become readable together. Deltas stay readable longer
  than versions, so that a reader can apply several of them, one after another;
- the base of adapters is readable as long as the publisher is open. Publishers of adapters of the same base share it.

`publish` may run in a thread alongside the event loop that serves: writing, hashing and comparing release the GIL.

Several ranks, each with some rows of every tensor, publish together. All call `publish` at the same time, and no rank
ever has the whole model (plan.py says who does what, meeting.py what happens if a rank fails). They take the same
steps together: describe their tensors, prepare the buffer, write their rows, hash the chunks, and, if there is a delta,
write it. Then every rank has all checksums, and makes the same manifest.

On one machine all ranks write to the buffers of rank 0, which serves them. Another machine has buffers of its own,
with memory only for its own rows, and its first rank serves these.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.weights import manifest
from windfall.weights.buffers import Buffer, BufferHandle, machine
from windfall.weights.delta import MAX_DELTAS, MAX_RATIO, part
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.manifest import Manifest
from windfall.weights.publishing import plan as plans
from windfall.weights.publishing.meeting import Meeting, OneRank, PublishRanks
from windfall.weights.publishing.plan import FilePlan, HeldRows, Piece, PublishPlan, RankOffer

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
MAX_THREADS = 16
MAX_DELTAS_RATIO = 0.5  # all deltas that are kept, as a share of the full copy; the newest is always kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankRows:
    """The rows of a tensor that this rank holds."""

    local: torch.Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first_row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """One readable version, or the base of adapters."""

    manifest: Manifest
    buffer: Buffer
    plan: PublishPlan
    held: HeldFile | None
    """What this rank serves of it, if it is the first of its machine."""


Hashes = dict[int, tuple[bytes, bytes]]
"""Checksum and seal of chunks, by their number."""
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
        beside: Publisher | None = None,
    ) -> None:
        """`dtype`: of published floating-point tensors; None: as they are. `ranks`: the processes that publish
        together, each with a publisher of its own. `on_machine`: equal for ranks that can share memory; None: find
        out. `read_here`: the GPU of this process also reads what other ranks publish. `beside`: a publisher of other
        adapters of the same base, which has published it or will."""
        if dtype is not None:
            manifest.width(dtype, "all")
        self.folder = folder
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self.ranks = ranks or OneRank()
        self.readable: tuple[Published, ...] = ()  # newest first; replaced as a whole, so any thread may read it
        self.files = HeldFiles()
        """What this rank serves, if it is the first of its machine."""
        self._beside = beside
        self._base: Published | None = None
        self.deltas: tuple[HeldFile, ...] = ()  # those that are served, newest first
        self._machine = machine() if on_machine is None else on_machine
        self._read_here = read_here
        self._planned: tuple[list[RankOffer], PublishPlan] | None = None  # the last plan, and what it was made from
        self._free: list[Buffer] = []  # buffers for deltas
        self._spare: tuple[Buffer, PublishPlan] | None = None  # the buffer that is not readable, and its layout
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="publish")
        self._closed = False

    @property
    def current(self) -> Manifest | None:
        return self.readable[0].manifest if self.readable else None

    @property
    def base(self) -> Published | None:
        """The base of the adapters."""
        return self._base if self._beside is None else self._beside.base

    def describe(self) -> tuple[m.Holding, ...]:
        """What this rank serves, with the base of its versions."""
        shared = self._beside.describe() if self._beside else ()
        base = (each for each in shared if self.base and each.file.digest == self.base.manifest.digest)
        return (*self.files.describe(), *base)

    def find(self, version: int) -> Published | None:
        return next((p for p in self.readable if p.manifest.version == version), None)

    @property
    def delta(self) -> HeldFile | None:
        """The delta from the previous version to the newest one, on the first rank of a machine."""
        newest, current = next(iter(self.deltas), None), self.current
        return newest if newest and current and newest.manifest.after == current.digest else None

    def publish(
        self,
        version: int,
        tensors: Tensors,
        *,
        copied: Callable[[], None] | None = None,
        base: str = "",
        scale: float = 1.0,
        pack: bool = False,
    ) -> Manifest:
        """The version can be pulled when this returns. `copied` is called once the tensors of this rank may change
        again. `base`: the digest from `publish_base`, if the tensors are an adapter, which is added times `scale`.
        `pack`: make the delta smaller, which takes time here and where it is applied."""

        def check() -> int:
            current = self.current
            if current and version <= current.version:
                what = f"version {version} is not newer than {current.version}"
                raise WindfallError(what, where="weights", fix="Publish versions in rising order.")
            if base and (self.base is None or self.base.manifest.digest != base):
                what = f"the base {base} of the adapter is not published"
                raise WindfallError(what, where=f"version {version}", fix="Call publish_base first.")
            return version

        with self._lock:
            meeting = Meeting(self.ranks, f"version {version}")
            plan, values = self._agree(meeting, tensors, check)
            fields = {"base": base, "scale": scale} if base else {}
            old = self.readable[0] if self.readable and self.readable[0].plan == plan else None
            fields |= {"version": version}
            new, delta = self._write(meeting, plan, values, old=old, copied=copied, pack=pack, **fields)
            if new.held:
                self.files.add(new.held)
            if delta:
                self._free.remove(delta.buffer)
                self.files.add(delta)
            self.readable, self._spare = (new, *self.readable), None
            self._keep_deltas((delta, *self.deltas) if delta else self.deltas)
            return new.manifest

    def publish_base(self, tensors: Tensors) -> Manifest:
        """Publish the weights that adapters apply to. They stay readable as long as the publisher is open."""
        if self._beside is not None:
            return self._beside.publish_base(tensors)

        def check() -> int:
            if self._base is not None:
                raise WindfallError("the base of adapters is already published", where="weights")
            return -1  # no version

        with self._lock:
            meeting = Meeting(self.ranks, "the base of adapters")
            plan, values = self._agree(meeting, tensors, check)
            (self._base, _), self._spare = self._write(meeting, plan, values), None
            if self._base.held:
                self.files.add(self._base.held)
            return self._base.manifest

    def close(self) -> None:
        """Withdraw all versions. Responses in progress are reset before their next piece."""
        with self._lock:
            withdrawn, deltas = (*self.readable, *((self._base,) if self._base else ())), self.deltas
            self.readable, self._base, self.deltas, self._closed = (), None, (), True
            for p in withdrawn:
                self._withdraw(p)
                p.buffer.close()
            for delta in deltas:
                self._drop_delta(delta)
            for buffer in self._free:
                buffer.close()
            self._free.clear()
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
            return number, RankOffer(machine=self._machine, chunk_bytes=self.chunk_bytes, tensors=rows)

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
        *,
        old: Published | None = None,
        copied: Callable[[], None] | None = None,
        pack: bool = False,
        **fields: Any,
    ) -> tuple[Published, HeldFile | None]:
        """Write a version into the spare buffer, and its delta. `old`: the version to compare with. `fields`: of the
        manifest."""
        rank, leader, file = self.ranks.rank, plan.shares[self.ranks.rank].leader, plan.file
        buffer: Any = None
        hashes: Hashes = {}
        delta: list[memoryview] = []
        stored: Buffer | None = None

        def prepare() -> tuple[BufferHandle | None, str]:
            self._withdraw_older()
            if self._spare and self._spare[1] != plan:
                self._drop_spare()
            if leader == rank and self._spare is None:
                self._spare = Buffer(file.nbytes, self.folder, used=file.parts.get(rank, ())), plan
            return self._spare[0].handle if leader == rank and self._spare else None, old.manifest.digest if old else ""

        def hash_chunks(chunks: Iterable[int]) -> None:
            for i in chunks:
                hashes[i] = manifest.hash_chunk(buffer.data[file.bounds[i] : file.bounds[i + 1]].data)

        def write_rows() -> int:
            """Returns the bytes of this rank in the delta; -1: none."""
            nonlocal buffer, delta
            from windfall.weights.publishing import row_writer

            assert handle is not None
            if self._spare is None or self._spare[0].handle != handle:
                self._drop_spare()
                self._spare = Buffer.map(handle), plan
            buffer = self._spare[0]
            if self._read_here and any(value.is_cuda for value in values.values()):
                buffer.lock([(0, buffer.nbytes)])
            hashing: list[Future[None]] = []

            def written(chunks: range) -> None:
                mine = [i for i in chunks if plan.only[i] == rank]
                hashing.append(self._threads.submit(hash_chunks, mine))

            before = old.buffer if old else None
            changes = row_writer.write(buffer, values, file.bounds, old=before, written=written, differences=pack)
            if copied:
                copied()
            if changes is not None and values:
                delta = part(changes, pack, self._threads.map)
            for each in hashing:
                each.result()
            return -1 if changes is None else sum(map(len, delta))

        def hash_and_reserve() -> tuple[Hashes, BufferHandle | None]:
            nonlocal stored
            if rank == leader:
                rest = [i for i in file.chunks(rank) if plan.only[i] < 0]
                list(self._threads.map(hash_chunks, ([i] for i in rest)))
                if changed is not None:
                    stored = self._reserve(changed.nbytes)
            return hashes, stored and stored.handle

        def write_delta() -> Hashes:
            handle = reserved[leader][1]
            assert handle is not None
            assert changed is not None
            target = stored or Buffer.map(handle)
            try:
                starts, bounds = list(accumulate(map(len, delta), initial=part_starts[rank])), changed.bounds
                chunks = range(bisect_left(bounds, starts[0]), bisect_left(bounds, starts[-1]))
                write = partial(_write_chunk, target.data, delta, starts)
                ranges = (bounds[i : i + 2] for i in chunks)
                return dict(zip(chunks, self._threads.map(write, ranges), strict=True))
            finally:
                if target is not stored:
                    target.close()

        prepared = meeting.step("prepare the buffer", prepare)
        handle = prepared[leader][0]
        old = old if len({digest for _, digest in prepared}) == 1 else None  # else a rank does not have it
        sizes = meeting.step("write their rows", write_rows)
        changed, part_starts = None, []
        if old is not None and min(sizes) >= 0 and sum(sizes) <= MAX_RATIO * file.nbytes:
            changed, part_starts = plan.delta(sizes)
        reserved = meeting.step("hash the chunks", hash_and_reserve)
        made = _manifest(file, [mine for mine, _ in reserved], entries=plan.entries, **fields)
        held = HeldFile(made, buffer, ranges=file.parts.get(rank, ()), filled=True) if rank == leader else None
        published = Published(manifest=made, buffer=buffer, plan=plan, held=held)
        if old is None or changed is None:
            return published, None
        found = meeting.step("write the delta", write_delta)
        if stored is None:
            return published, None
        names = {"version": made.version, "before": old.manifest.digest, "after": made.digest, "result": made.encode()}
        blob = _manifest(changed, found, **names)
        return published, HeldFile(blob, stored, ranges=changed.parts.get(rank, ()), filled=True)

    def _reserve(self, nbytes: int) -> Buffer:
        """A buffer for a delta: a free one, or a new one, with room for the next deltas to be larger."""
        while self._free and self._free[-1].nbytes < nbytes:
            self._free.pop().close()
        if not self._free:
            self._free.append(Buffer(nbytes + nbytes // 4, self.folder, lazy=True))
        return self._free[-1]

    def _withdraw_older(self) -> None:
        """Withdraw all versions but the newest. The buffer of one of them is the spare one then."""
        older = [p for p in self.readable[1:] if not (p.held and p.held.pinned)]
        self.readable = tuple(p for p in self.readable if p not in older)
        for p in older:
            self._withdraw(p)
            self._drop_spare()
            self._spare = p.buffer, p.plan

    def _keep_deltas(self, deltas: Sequence[HeldFile]) -> None:
        """Withdraw deltas that do not lead to the newest version, and those that are too large together with newer
        ones. `deltas`: newest first."""
        assert self.current is not None
        kept, after, nbytes = [], self.current.digest, 0
        for delta in deltas:
            nbytes += delta.manifest.nbytes
            fits = not kept or (nbytes <= MAX_DELTAS_RATIO * self.current.nbytes and len(kept) < MAX_DELTAS)
            if fits and delta.manifest.after == after:
                kept.append(delta)
                after = delta.manifest.before
            elif delta.pinned:
                kept.append(delta)
            else:
                self._drop_delta(delta)
        self.deltas = tuple(kept)

    def _withdraw(self, published: Published) -> None:
        if published.held:
            self.files.remove(published.held)

    def _drop_delta(self, delta: HeldFile) -> None:
        self.files.remove(delta)
        self._free.append(delta.buffer)

    def _drop_spare(self) -> None:
        if self._spare:
            self._spare[0].close()
        self._spare = None


def _write_chunk(
    data: np.ndarray, pieces: Sequence[memoryview], starts: Sequence[int], chunk: tuple[int, int]
) -> tuple[bytes, bytes]:
    """Write a range of a file whose bytes are in these pieces, which start there. Returns its hashes."""
    start, stop = chunk
    inside = []
    for i in range(bisect_right(starts, start) - 1, bisect_left(starts, stop)):
        inside.append(pieces[i][max(start - starts[i], 0) : stop - starts[i]])
        at = max(start, starts[i])
        data[at : at + len(inside[-1])] = inside[-1]
    return manifest.hash_chunk(*inside)


def _manifest(file: FilePlan, hashed: Sequence[Hashes], **fields: Any) -> Manifest:
    """The manifest of a file whose chunks were hashed by several ranks."""
    found = {i: both for mine in hashed for i, both in mine.items()}
    chunks = [found[i] for i in range(len(file.bounds) - 1)]
    return manifest.make(
        nbytes=file.nbytes,
        chunk_bytes=file.chunk_bytes,
        chunks=b"".join(checksum for checksum, _ in chunks),
        seals=b"".join(seal for _, seal in chunks),
        cuts=file.cuts,
        **fields,
    )


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
