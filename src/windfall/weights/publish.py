"""Publishes versions of the weights, which workers can pull while training continues.

    trainer                                                        worker
    state_dict ──▶ copy_out ──▶ Buffer (buffers) ──▶ serve ── HTTP ──▶ download ──▶ pull ──▶ engine
        │                          │ hash               ▲ sendfile        verify     ▲
        │                          ▼                    │                            │
        │                       Manifest (manifest) ────┤                            │
        └──▶ device_delta, or delta ──▶ delta Buffer ───┘              delta.apply ──┘

There are two buffers. `publish` writes into the one that is not current and makes it current in one assignment, so that
a reader sees the old version or the new one, never a mixture. Rules:

- two versions are readable: the current one, and the previous one until `publish` needs its buffer. The previous
  version is withdrawn before its first byte is overwritten, without waiting for its readers: they notice by status or
  checksum;
- a tensor is written once, even if it has several names;
- the delta from the previous version is part of a version: both become readable together;
- the base of adapters is readable as long as the publisher is open.

Bytes are copied from a GPU in the order of the buffer, on a separate stream, and every chunk is hashed while later ones
are still on the bus. Meanwhile the delta is computed on the device, if it has room for a copy of the previous version
(device_delta.py); otherwise the two buffers are compared on the host. The tensors may change again once the last byte
has been copied; hashing continues.

`publish` may run in a thread alongside the event loop that serves: copying, hashing and comparing release the GIL.

Several ranks, each with some rows of every tensor, publish together. All call `publish` at the same time, and no rank
ever has the whole model (plan.py says who does what, meeting.py what happens if a rank fails):

    rank 0    rows ──▶ ┌──────────┐ ──▶ serve        on one machine all ranks write to the two buffers of rank 0;
    rank 1    rows ──▶ │ buffer A │                  rank 0 serves them
    ───────────────────└──────────┘────────────
    rank 2    rows ──▶ ┌──────────┐ ──▶ serve        another machine has buffers of its own, with memory only for its
    rank 3    rows ──▶ │ buffer B │                  own rows, and its first rank serves these. The manifest, which
                       └──────────┘                  rank 0 serves, says which bytes are where

On several machines, a version becomes readable on rank 0 after it is readable on all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windfall.errors import WindfallError
from windfall.weights import manifest
from windfall.weights import plan as plans
from windfall.weights.buffers import Buffer, BufferHandle, machine
from windfall.weights.manifest import Manifest
from windfall.weights.meeting import Meeting, OneRank, PublishRanks
from windfall.weights.plan import HeldRows, PublishPlan, RankOffer
from windfall.weights.source import Published
from windfall.weights.version_writer import PieceValues, VersionWriter

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20


class TensorShard(Protocol):
    """The rows of a tensor that this rank holds."""

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ...

    @property
    def first_row(self) -> int: ...


Tensors = Mapping[str, "torch.Tensor | TensorShard"]


class Publisher:
    def __init__(
        self,
        folder: Path | None = None,
        *,
        dtype: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        delta: bool = True,
        threads: int | None = None,
        device_delta: bool | None = None,
        ranks: PublishRanks | None = None,
        on_machine: str | None = None,
    ) -> None:
        """`device_delta`: compute deltas on the tensors' device; None: if it is a GPU with room for a copy. `ranks`:
        the processes that publish together, each with a publisher of its own. `on_machine`: equal for ranks that can
        share memory; None: find out."""
        if dtype is not None:
            manifest.width(dtype, "all")
        self.folder = folder
        self.dtype = dtype
        self.chunk_bytes = chunk_bytes
        self.with_delta = delta
        self.ranks = ranks or OneRank()
        self.address = ""
        """Where this rank's weight server can be reached. The first rank of every machine but that of rank 0 must set
        it before `publish`."""
        self.readable: tuple[Published, ...] = ()  # newest first; replaced as a whole, so any thread may read it
        self.base: Published | None = None  # of adapters
        self._machine = machine() if on_machine is None else on_machine
        self._offer: RankOffer | None = None  # of this rank, for the last plan
        self._plan: PublishPlan | None = None
        self._spare: Buffer | None = None
        self._lock = threading.Lock()
        self._writer = VersionWriter(folder, chunk_bytes, self.ranks, threads, device_delta)
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
            plan, sources = self._agree(meeting, tensors, check)
            handle, old = self._prepare(meeting, plan)
            published = self._writer.write(
                meeting,
                plan,
                sources,
                lambda: self._map_spare(handle),
                undo,
                copied=copied,
                old=old,
                keep_on_device=self.with_delta,
                version=version,
                **({"base": base, "scale": scale} if base else {}),
            )
            self._make_readable(meeting, published)
            undo.pop_all()
            return published.manifest

    def publish_base(self, tensors: Tensors) -> Manifest:
        """Publish the weights that adapters apply to. They stay readable as long as the publisher is open."""
        buffers: list[Buffer] = []

        def check() -> int:
            if self.base is not None:
                raise WindfallError("the base of adapters is already published", where="weights")
            return -1  # no version

        with self._lock, ExitStack() as undo:
            meeting = Meeting(self.ranks, "the base of adapters")
            undo.callback(lambda: [self._writer.drop(buffer) for buffer in buffers])
            plan, sources = self._agree(meeting, tensors, check)
            leader = plan.shares[self.ranks.rank].leader

            def create() -> BufferHandle | None:
                if leader == self.ranks.rank:
                    buffers.append(self._new_buffer(plan))
                return buffers[0].handle if buffers else None

            handle = meeting.step("prepare the buffer", create, BufferHandle | None)[leader]
            assert handle is not None

            def find() -> Buffer:
                if not buffers:
                    buffers.append(Buffer.map(handle))
                return buffers[0]

            self.base = self._writer.write(meeting, plan, sources, find, undo, version=0)
            undo.pop_all()
            return self.base.manifest

    def close(self) -> None:
        """Withdraw all versions. Responses in progress are reset before their next piece."""
        with self._lock:
            withdrawn, self.readable, self._closed = self.readable, (), True
            if self.base:
                withdrawn, self.base = (*withdrawn, self.base), None
            for p in withdrawn:
                self._writer.drop(p.buffer)
                if p.delta_buffer:
                    p.delta_buffer.close()
            if self._spare:
                self._writer.drop(self._spare)
            self._spare = None
            self._writer.close()

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
        said = meeting.step(doing, announce, tuple[int, bool])
        for rank, (number, _) in enumerate(said):
            if number != said[0][0]:
                what = f"rank {rank} publishes version {number}, rank 0 version {said[0][0]} (-1: the base of adapters)"
                raise WindfallError(what, where="weights", fix="Publish the same versions on all ranks.")
        if not all(unchanged for _, unchanged in said):
            self._offer = None
            self._plan = plans.make([o for o in meeting.step(doing, lambda: offer, RankOffer) if o is not None])
            self._offer = offer
        assert self._plan is not None
        return self._plan, {p: values[p.entry.name] for p in self._plan.shares[self.ranks.rank].pieces}

    def _prepare(self, meeting: Meeting, plan: PublishPlan) -> tuple[BufferHandle, Published | None]:
        """Withdraw the older version. Returns the buffer of this machine that is free now, and the version to compare
        with, if all ranks have it."""
        old = self.readable[0] if self.with_delta and self.readable and self.readable[0].plan == plan else None
        leader = plan.shares[self.ranks.rank].leader

        def prepare() -> tuple[BufferHandle | None, str]:
            reusable = self._withdraw(plan)
            handle = self._spare_buffer(plan, reusable).handle if leader == self.ranks.rank else None
            return handle, old.manifest.digest if old else ""

        said = meeting.step("prepare the buffer", prepare, tuple[BufferHandle | None, str])
        handle = said[leader][0]
        assert handle is not None
        return handle, old if len({digest for _, digest in said}) == 1 else None

    def _withdraw(self, plan: PublishPlan) -> bool:
        """Make the buffer of the older version the spare one. Returns whether it has the same layout as the new one."""
        if len(self.readable) < 2:
            return False
        old, self.readable = self.readable[1], self.readable[:1]
        self._spare = old.buffer
        if old.delta_buffer:
            old.delta_buffer.close()
        return old.plan == plan

    def _spare_buffer(self, plan: PublishPlan, reusable: bool) -> Buffer:
        """The buffer that is not current, with zeros between its tensors."""
        if self._spare and reusable:
            return self._spare
        if self._spare and self._spare.nbytes == plan.nbytes and self._spare.whole and not plan.sources:
            self._spare.data[:] = 0  # bytes of another layout between the tensors would change the checksums
            return self._spare
        if self._spare:
            self._writer.drop(self._spare)
        self._spare = None
        self._spare = self._new_buffer(plan)
        return self._spare

    def _new_buffer(self, plan: PublishPlan) -> Buffer:
        return Buffer(plan.nbytes, self.folder, used=plan.parts(self.ranks.rank) if plan.sources else None)

    def _map_spare(self, handle: BufferHandle) -> Buffer:
        """The spare buffer, as an object of this process."""
        if self._spare is None or self._spare.handle != handle:
            if self._spare:
                self._writer.drop(self._spare)
            self._spare = None
            self._spare = Buffer.map(handle)
        return self._spare

    def _make_readable(self, meeting: Meeting, published: Published) -> None:
        """On rank 0 last: workers get the manifest from there."""

        def switch() -> None:
            self.readable, self._spare = (published, *self.readable[:1]), None

        if published.plan.sources:
            meeting.step("make the version readable", lambda: switch() if self.ranks.rank else None, None)
        if self.ranks.rank == 0 or not published.plan.sources:
            switch()


def describe(tensors: Tensors, dtype: str | None) -> tuple[tuple[HeldRows, ...], dict[str, torch.Tensor]]:
    """The rows for an offer, and the rows' values by name. `dtype`: the published dtype of floating-point tensors."""
    import torch

    if not tensors:
        raise WindfallError("no tensors to publish", where="weights", fix="Pass the state_dict() of the module.")
    rows, values, storages = [], {}, {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "to_local"):  # a DTensor: its shape is that of the whole, its memory that of the shard
            raise WindfallError(
                f"tensor {name!r} is a DTensor", where="weights", fix="Pass a TensorShard of its local rows."
            )
        whole = isinstance(tensor, torch.Tensor)
        t, shape, first = (
            (tensor, tuple(tensor.shape), 0) if whole else (tensor.local, tuple(tensor.shape), tensor.first_row)
        )
        if t.device.type == "meta" or not hasattr(t, "data_ptr"):
            raise WindfallError(f"tensor {name!r} has no values", where="weights", fix="Load the model first.")
        count, total = (s[0] if len(s) else 1 for s in (t.shape, shape))
        if t.dim() != len(shape) or t.shape[1:] != shape[1:] or not 0 <= first <= total - count:
            what = f"tensor {name!r}: a shard {list(t.shape)} at row {first} is not part of {list(shape)}"
            raise WindfallError(what, where="weights", fix="Pass shards of dimension 0.")
        published = dtype if dtype and t.is_floating_point() else str(t.dtype).removeprefix("torch.")
        identity = (t.data_ptr(), t.dtype, t.shape, t.stride(), t.device)
        storage = storages.setdefault(identity, len(storages)) if t.numel() else -1
        held = count if t.numel() else 0
        rows.append(HeldRows(name=name, dtype=published, shape=shape, storage=storage, first=first, count=held))
        values[name] = t.detach()
    return tuple(rows), values
