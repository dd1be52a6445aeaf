"""Writes one version of the weights: this rank's rows into the buffer of its machine, checksums, manifest, and delta.

All ranks take the same steps together (meeting.py):

    write their rows            copy them to the buffer, and hash the chunks that no other rank writes to
    hash their chunks           hash the shared chunks, and compare blocks with the previous version
    prepare the delta's buffer  the leader of every machine creates it; the size is known from the ranks' tables
    write the delta             every rank its own part

The last two are left out if there is no delta. Then every rank has the checksums of all and makes the same manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from windfall.weights import copy_out, manifest
from windfall.weights.buffers import Buffer, BufferHandle
from windfall.weights.delta_share import DeltaShare
from windfall.weights.manifest import DeltaManifest
from windfall.weights.meeting import Meeting, PublishRanks
from windfall.weights.plan import Piece, PublishPlan
from windfall.weights.source import Published

if TYPE_CHECKING:
    import torch

PieceValues = Mapping[Piece, "torch.Tensor"]


class VersionWriter:
    def __init__(
        self,
        folder: Path | None,
        chunk_bytes: int,
        ranks: PublishRanks,
        threads: int | None,
        use_device_delta: bool | None,
    ) -> None:
        self.folder = folder
        self.chunk_bytes = chunk_bytes
        self.rank = ranks.rank
        self.use_device_delta, self.device_delta = use_device_delta, None
        threads = threads or min(8, max(1, (os.cpu_count() or 1) // ranks.size))
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="publish")
        # Enqueueing copies takes about as long as the copies, so it has its own thread.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._pages = copy_out.LockedPages()

    def write(
        self,
        meeting: Meeting,
        plan: PublishPlan,
        sources: PieceValues,
        find_buffer: Callable[[], Buffer],
        undo: ExitStack,
        *,
        copied: Callable[[], None] | None = None,
        old: Published | None = None,
        keep_on_device: bool = False,
        **fields: Any,
    ) -> Published:
        """`old`: the version to compare with. `keep_on_device`: the next version may be compared with this one.
        `fields`: of the manifest. `undo` is extended by what must be done if the version does not become readable."""
        delta = DeltaShare(plan, self.rank, self.pool.map) if old else None
        share = plan.shares[self.rank]

        def write_rows() -> None:
            nonlocal buffer, hashes
            buffer = find_buffer()
            after = copy_out.ready_event(sources.values())
            copying = self._copier.submit(self.copy, buffer, plan, sources, after)
            try:
                if keep_on_device:
                    self._compare_on_device(plan, sources, delta, old, fields["version"])
            finally:
                hashes, last = copying.result()
                copy_out.wait(sources.values(), last)
            if copied:
                copied()

        def hash_and_compare() -> tuple[list[int], bytes | None]:
            assert buffer is not None
            shared = self.hashes(buffer.data, plan.bounds, share.shared_chunks)
            rows = delta.encode(old.buffer.data, buffer.data) if delta and old else None
            return [*(h.result() for h in hashes), *shared], rows

        buffer, hashes = None, list[Future[int]]()
        meeting.step("write their rows", write_rows, None)
        done = meeting.step("hash their chunks", hash_and_compare, tuple[list[int], bytes | None])
        assert buffer is not None
        made = manifest.make(
            entries=plan.entries,
            nbytes=plan.nbytes,
            chunk_bytes=self.chunk_bytes,
            servers=plan.servers,
            sources=plan.sources,
            chunks=_in_order(plan, [checksums for checksums, _ in done]),
            **fields,
        )
        published = Published(manifest=made, encoded=made.encode(), buffer=buffer, plan=plan, update_bytes=plan.nbytes)
        if delta is None or old is None:
            return published
        tables = [rows for _, rows in done]
        sizes = delta.sizes(tables)
        published = replace(published, update_bytes=delta.update_bytes(sizes))
        stored = self._store_delta(meeting, delta, sizes, tables, undo)
        return published if stored is None else self._with_delta(published, old, stored)

    def drop(self, buffer: Buffer) -> None:
        self._pages.unlock(buffer)
        buffer.close()

    def close(self) -> None:
        self.pool.shutdown()
        self._copier.shutdown()

    def copy(
        self, buffer: Buffer, plan: PublishPlan, sources: PieceValues, after: Any
    ) -> tuple[list[Future[int]], Any]:
        """Start to write this rank's rows, and to hash each of its own chunks once it is copied. Returns futures of the
        checksums, and the event after which all bytes are copied (None: they are copied)."""
        share = plan.shares[self.rank]
        if after is not None:
            self._pages.lock(buffer, share.pieces)
        hashes: list[Future[int]] = []
        chunks, event = share.own_chunks, None
        for end, event in copy_out.copy(buffer, sources, after):
            while len(hashes) < len(chunks) and plan.bounds[chunks[len(hashes)] + 1] <= end:
                start, stop = plan.bounds[chunks[len(hashes)]], plan.bounds[chunks[len(hashes)] + 1]
                hashes.append(self.pool.submit(self.hash, buffer.data[start:stop], event))
        return hashes, event

    def hashes(self, data: np.ndarray, bounds: Sequence[int], which: Sequence[int]) -> list[int]:
        return list(self.pool.map(lambda i: self.hash(data[bounds[i] : bounds[i + 1]], None), which))

    def hash(self, chunk: np.ndarray, copied: Any) -> int:
        """The checksum of a chunk. `copied` is the event after which its bytes have been copied; None: they have."""
        if copied is not None:
            copied.synchronize()
        return xxhash.xxh3_64_intdigest(chunk.data)

    def _compare_on_device(
        self, plan: PublishPlan, sources: PieceValues, delta: DeltaShare | None, old: Published | None, version: int
    ) -> None:
        """Compare this rank's blocks on the tensors' device, if it holds the old version, and store the new one."""
        import torch

        try:
            encoder = self._device_encoder(plan, {t.device for t in sources.values()})
            if encoder is None:
                return
            if delta and old and encoder.version == old.manifest.version:
                delta.on_device(encoder, sources)
            encoder.store(sources, version)
        except torch.OutOfMemoryError:  # the memory was taken meanwhile: from now on compare the buffers on the host
            self.device_delta, self.use_device_delta = None, False

    def _device_encoder(self, plan: PublishPlan, devices: set[torch.device]) -> Any:
        """The DeviceDelta with the previous version; an empty one if the layout is new; None if there can be none."""
        if self.use_device_delta is False or len(devices) != 1:
            return None
        (device,) = devices
        if self.device_delta is None or self.device_delta.plan != plan or self.device_delta.device != device:
            from windfall.weights.device_delta import DeviceDelta, fits

            self.device_delta = None
            nbytes = sum(p.stop - p.start for p in plan.shares[self.rank].pieces)
            if self.use_device_delta or fits(nbytes, device):
                self.device_delta = DeviceDelta(plan, self.rank, device)
        return self.device_delta

    def _store_delta(
        self,
        meeting: Meeting,
        delta: DeltaShare,
        sizes: Mapping[int, int],
        tables: Sequence[bytes | None],
        undo: ExitStack,
    ) -> Buffer | None:
        """The buffer with the delta of this machine, on its leader."""
        if not sizes:
            return None
        leader, stored = delta.share.leader, None

        def reserve() -> BufferHandle | None:
            nonlocal stored
            if self.rank != leader or leader not in sizes:
                return None
            stored = Buffer(sizes[leader], self.folder)
            undo.callback(stored.close)
            return stored.handle

        handle = meeting.step("prepare the delta's buffer", reserve, BufferHandle | None)[leader]

        def write() -> None:
            if handle is None:
                return
            target = stored or Buffer.map(handle)
            delta.write(target, tables)
            if target is not stored:
                target.close()

        meeting.step("write the delta", write, None)
        return stored

    def _with_delta(self, published: Published, old: Published, stored: Buffer) -> Published:
        bounds = manifest.chunk_bounds(stored.nbytes, self.chunk_bytes)
        made = DeltaManifest(
            base=old.manifest.digest,
            digest=published.manifest.digest,
            nbytes=stored.nbytes,
            chunk_bytes=self.chunk_bytes,
            chunks=tuple(self.hashes(stored.data, bounds, range(len(bounds) - 1))),
        )
        return replace(published, delta=made, delta_encoded=made.encode(), delta_buffer=stored)


def _in_order(plan: PublishPlan, checksums: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The checksums of all chunks, from those of each rank."""
    out = [0] * (len(plan.bounds) - 1)
    for share, found in zip(plan.shares, checksums, strict=True):
        for i, checksum in zip((*share.own_chunks, *share.shared_chunks), found, strict=True):
            out[i] = checksum
    return tuple(out)
