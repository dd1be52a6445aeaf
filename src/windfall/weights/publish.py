"""Publishes versions of the weights, which workers can pull while training continues.

    trainer                                                              worker
    state_dict ──▶ copy_out ──▶ Buffer (buffers) ──▶ serve ── HTTP ──▶ connection ──▶ download ──▶ pull ──▶ engine
        │                          │ hash               ▲ sendfile                       verify     ▲
        │                          ▼                    │                                           │
        │                       Manifest (manifest) ────┤                                           │
        └──▶ device_delta, or delta ──▶ delta Buffer ───┘                             delta.apply ──┘

There are two buffers. `publish` writes into the one that is not current and makes it current in one assignment, so that
a reader sees the old version or the new one, never a mixture. Rules:

- two versions are readable: the current one, and the previous one until `publish` needs its buffer. The previous
  version is withdrawn before its first byte is overwritten, without waiting for its readers: they notice by status or
  checksum;
- a tensor is written once, even if it has several names;
- the delta from the previous version is part of a version: both become readable together.

Bytes are copied from a GPU in the order of the buffer, on a separate stream, and every chunk is hashed while later ones
are still on the bus. Meanwhile the delta is computed on the device, if it has room for a copy of the previous version
(device_delta.py); otherwise the two buffers are compared on the host. The tensors may change again once the last byte
has been copied; hashing continues.

`publish` may run in a thread alongside the event loop that serves: copying, hashing and comparing release the GIL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from windfall.errors import WindfallError
from windfall.weights import copy_out, delta, manifest
from windfall.weights.buffers import Buffer
from windfall.weights.manifest import DeltaManifest, Manifest, TensorEntry

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
DELTA_WRITE_BYTES = 8 << 20  # bytes of a delta written by one call


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """One readable version. The encoded manifests are kept because every worker requests them."""

    manifest: Manifest
    encoded: bytes
    buffer: Buffer
    delta: DeltaManifest | None = None
    delta_encoded: bytes = b""
    delta_buffer: Buffer | None = None


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
    ) -> None:
        """`device_delta`: compute deltas on the tensors' device; None: if it is a GPU with room for a copy."""
        if dtype is not None:
            manifest.width(dtype, "all")
        self.folder, self.dtype, self.chunk_bytes, self.with_delta = folder, dtype, chunk_bytes, delta
        self.readable: tuple[Published, ...] = ()  # newest first; replaced as a whole, so any thread may read it
        self._spare: Buffer | None = None
        self._use_device_delta, self._device_delta = device_delta, None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="publish")
        # Enqueueing copies takes about as long as the copies, so it has its own thread.
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")
        self._pinned: dict[int, int] = {}  # addresses of the buffers whose pages are locked for the GPU, by descriptor
        self._closed = False

    @property
    def current(self) -> Manifest | None:
        return self.readable[0].manifest if self.readable else None

    def find(self, version: int) -> Published | None:
        return next((p for p in self.readable if p.manifest.version == version), None)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, copied: Callable[[], None] | None = None
    ) -> Manifest:
        """The version can be pulled when this returns. `copied` is called once the tensors may change again."""
        with self._lock:
            if self._closed:
                raise WindfallError("the weight publisher is closed", where=f"version {version}")
            previous = self.readable[0] if self.readable else None
            if previous and version <= previous.manifest.version:
                what = f"version {version} is not newer than {previous.manifest.version}"
                raise WindfallError(what, where="weights", fix="Publish versions in rising order.")
            entries, nbytes, sources = self._layout(tensors)
            buffer = self._spare_buffer(nbytes, entries)
            base = previous if self.with_delta and previous and previous.manifest.entries == entries else None
            with ExitStack() as undo:
                copying = self._copier.submit(self._copy, buffer, sources, copy_out.ready_event(sources.values()))
                try:
                    on_device, pieces = self._encode_on_device(base, version, entries, nbytes, sources)
                    delta_buffer = self._store_delta(pieces, undo)
                finally:
                    hashes, last = copying.result()
                    copy_out.wait(sources.values(), last)
                if copied:
                    copied()
                new_manifest = manifest.make(
                    version=version, entries=entries, nbytes=nbytes, chunk_bytes=self.chunk_bytes,
                    chunks=tuple(h.result() for h in hashes),
                )  # fmt: skip
                if base and not on_device:
                    blob = delta.encode(base.buffer.data, buffer.data, new_manifest, map_=self._pool.map)
                    delta_buffer = self._store_delta(None if blob is None else [blob], undo)
                published = self._published(new_manifest, buffer, base, delta_buffer)
                undo.pop_all()
            self.readable, self._spare = (published, *self.readable[:1]), None
            return new_manifest

    def close(self) -> None:
        """Withdraw all versions. Responses in progress are reset before their next piece."""
        with self._lock:
            withdrawn, self.readable, self._closed = self.readable, (), True
            for p in withdrawn:
                self._drop(p.buffer)
                if p.delta_buffer:
                    p.delta_buffer.close()
            if self._spare:
                self._drop(self._spare)
            self._spare = None
            self._pool.shutdown()
            self._copier.shutdown()

    def _layout(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[TensorEntry, ...], int, dict[TensorEntry, torch.Tensor]]:
        if not tensors:
            raise WindfallError("no tensors to publish", where="weights", fix="Pass the state_dict() of the module.")
        rows, storages = [], {}
        for name, t in tensors.items():
            if t.device.type == "meta" or not hasattr(t, "data_ptr"):
                raise WindfallError(f"tensor {name!r} has no values", where="weights", fix="Load the model first.")
            dtype = self.dtype if self.dtype and t.is_floating_point() else str(t.dtype).removeprefix("torch.")
            identity = (t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) if t.numel() else name
            rows.append((name, dtype, tuple(t.shape), storages.setdefault(identity, len(storages))))
        entries, nbytes = manifest.layout(rows)
        first = {storage: i for i, (*_, storage) in reversed(list(enumerate(rows)))}
        return entries, nbytes, {entries[i]: tensors[entries[i].name] for i in first.values()}

    def _spare_buffer(self, nbytes: int, entries: tuple[TensorEntry, ...]) -> Buffer:
        """The buffer that is not current, withdrawn from readers, with zeros between its tensors."""
        if len(self.readable) == 2:
            old, self.readable = self.readable[1], self.readable[:1]
            self._spare = old.buffer
            if old.delta_buffer:
                old.delta_buffer.close()
            if old.manifest.entries == entries:
                return self._spare
        if self._spare and self._spare.nbytes == nbytes:
            self._spare.data[:] = 0  # bytes of another layout between the tensors would change the checksums
            return self._spare
        if self._spare:
            self._drop(self._spare)
        self._spare = None
        self._spare = Buffer(nbytes, self.folder)
        return self._spare

    def _copy(
        self, buffer: Buffer, sources: dict[TensorEntry, torch.Tensor], after: Any
    ) -> tuple[list[Future[int]], Any]:
        """Start to fill the buffer, and to hash every chunk once it is copied. Returns futures of the checksums, and
        the event after which all bytes are copied (None: they are copied)."""
        if after is not None:
            self._pin(buffer)
        hashes: list[Future[int]] = []
        chunks, event = self._chunks(buffer.nbytes), None
        for end, event in copy_out.copy(buffer, sources, after):
            copied = len(chunks) if end == buffer.nbytes else end // self.chunk_bytes
            for start in chunks[len(hashes) : copied]:
                hashes.append(self._pool.submit(self._hash, buffer.data, start, event))
        return hashes, event

    def _encode_on_device(
        self, base: Published | None, version: int, entries: tuple[TensorEntry, ...], nbytes: int,
        sources: dict[TensorEntry, torch.Tensor],
    ) -> tuple[bool, list[Any] | None]:  # fmt: skip
        """Whether the delta was computed on the tensors' device, and its pieces (None if they are too large)."""
        import torch

        try:
            encoder = self._device_encoder(entries, nbytes, {t.device for t in sources.values()})
            if encoder is None:
                return False, None
            has_base = base is not None and encoder.version == base.manifest.version
            pieces = encoder.encode(sources, base.manifest) if base and has_base else None
            encoder.store(sources, version)
        except torch.OutOfMemoryError:  # the memory was taken meanwhile: from now on compare the buffers on the host
            self._device_delta, self._use_device_delta = None, False
            return False, None
        return has_base, pieces

    def _device_encoder(self, entries: tuple[TensorEntry, ...], nbytes: int, devices: set[torch.device]) -> Any:
        """The DeviceDelta with the previous version; an empty one if the layout is new; None if there can be none."""
        if not self.with_delta or self._use_device_delta is False or len(devices) != 1 or not nbytes:
            return None
        (device,) = devices
        if self._device_delta is None or self._device_delta.entries != entries or self._device_delta.device != device:
            from windfall.weights.device_delta import DeviceDelta, fits

            self._device_delta = None
            if self._use_device_delta or fits(nbytes, device):
                self._device_delta = DeviceDelta(entries, nbytes, device)
        return self._device_delta

    def _pin(self, buffer: Buffer) -> None:
        """Lock the buffer's pages for the GPU, once: a copy into pageable memory is several times slower."""
        import torch

        if buffer.fd not in self._pinned and buffer.nbytes:
            runtime: Any = torch.cuda.cudart()
            if int(runtime.cudaHostRegister(buffer.data.ctypes.data, buffer.nbytes, 1)) == 0:
                self._pinned[buffer.fd] = buffer.data.ctypes.data

    def _drop(self, buffer: Buffer) -> None:
        if buffer.fd in self._pinned:
            import torch

            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._pinned.pop(buffer.fd))
        buffer.close()

    def _store_delta(self, pieces: list[Any] | None, undo: ExitStack) -> Buffer | None:
        """A buffer with the delta, from which it can be served."""
        if pieces is None:
            return None
        stored, at = Buffer(sum(map(len, pieces)), self.folder), 0
        undo.callback(stored.close)
        parts = []
        for piece in pieces:
            data = memoryview(piece)
            starts = range(0, len(data), DELTA_WRITE_BYTES)
            parts += [(at + i, data[i : i + DELTA_WRITE_BYTES]) for i in starts]
            at += len(data)
        # Write through the descriptor: the kernel writes to a file faster than it maps new pages of it.
        list(self._pool.map(lambda part: _write(stored.fd, *part), parts))
        return stored

    def _published(
        self, new_manifest: Manifest, buffer: Buffer, base: Published | None, delta_buffer: Buffer | None
    ) -> Published:
        published = Published(manifest=new_manifest, encoded=new_manifest.encode(), buffer=buffer)
        if base is None or delta_buffer is None:
            return published
        made = DeltaManifest(
            base=base.manifest.digest, digest=new_manifest.digest, nbytes=delta_buffer.nbytes,
            chunk_bytes=self.chunk_bytes, chunks=self._hashes(delta_buffer.data),
        )  # fmt: skip
        return replace(published, delta=made, delta_encoded=made.encode(), delta_buffer=delta_buffer)

    def _chunks(self, nbytes: int) -> range:
        return range(0, nbytes, self.chunk_bytes)

    def _hashes(self, data: np.ndarray) -> tuple[int, ...]:
        return tuple(self._pool.map(lambda at: self._hash(data, at, None), self._chunks(len(data))))

    def _hash(self, data: np.ndarray, at: int, copied: Any) -> int:
        """The checksum of a chunk. `copied` is the event after which its bytes have been copied; None: they have."""
        if copied is not None:
            copied.synchronize()
        return xxhash.xxh3_64_intdigest(data[at : at + self.chunk_bytes].data)


def _write(fd: int, at: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        at, data = at + done, data[done:]
