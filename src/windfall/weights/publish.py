"""Puts versions of the weights where workers can pull them, while training goes on.

There are two buffers. `publish` writes into the one that is not current and makes it current in one assignment, so
that a reader sees the old version or the new one, never a mixture. Rules:

- two versions can be read: the current one and the one before, until `publish` needs its buffer; it is withdrawn
  before the first byte of it is written, and nobody waits for its readers: they find out by status or by checksum;
- a tensor is written once, however many names it has;
- the delta against the version before is part of the version: both are there, or neither.

From a GPU, bytes are copied in the order of the buffer, on a stream of their own, and every chunk is hashed while later
ones are still on the bus. Meanwhile the delta is found on the device, where there is room for a copy of the version
before (see device.py); else the two buffers are compared here. The tensors may change again when the last byte has
arrived; hashing goes on.

`publish` may run in a thread beside the event loop that serves; copying, hashing and comparing let go of the
interpreter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
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
KEEP_BYTES = 8 << 20
"""Of a delta, written at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """One readable version. The encoded manifests are kept because every worker asks for them."""

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
        shadow: bool | None = None,
    ) -> None:
        """`shadow`: find deltas on the tensors' device; None: if it is a GPU with room for a copy."""
        if dtype is not None:
            manifest.width(dtype, "all")
        self.folder, self.dtype, self.chunk_bytes, self.with_delta = folder, dtype, chunk_bytes, delta
        self.readable: tuple[Published, ...] = ()
        """Newest first. Replaced as a whole, so that any thread may look."""
        self._spare: Buffer | None = None
        self._wants_shadow, self._shadow = shadow, None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="publish")
        self._side = ThreadPoolExecutor(1, thread_name_prefix="copy")
        """Asking for copies takes about as long as the copies: somebody else's time."""
        self._pinned: dict[int, int] = {}
        """Buffers that the GPU's driver knows: their address, by descriptor."""
        self._closed = False

    @property
    def current(self) -> Manifest | None:
        return self.readable[0].manifest if self.readable else None

    def find(self, version: int) -> Published | None:
        return next((p for p in self.readable if p.manifest.version == version), None)

    def publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], *, copied: Callable[[], None] | None = None
    ) -> Manifest:
        """Returns when the version can be pulled. `copied` is called as soon as the tensors may change again."""
        with self._lock:
            if self._closed:
                raise WindfallError("the weight publisher is closed", where=f"version {version}")
            before = self.readable[0] if self.readable else None
            if before and version <= before.manifest.version:
                raise WindfallError(
                    f"version {version} is not newer than {before.manifest.version}", where="weights",
                    fix="Publish versions in rising order.",
                )  # fmt: skip
            entries, nbytes, sources = self._layout(tensors)
            buffer = self._take(nbytes, entries)
            base = before if self.with_delta and before and before.manifest.entries == entries else None
            with ExitStack() as undo:
                copying = self._side.submit(self._copy, buffer, sources, copy_out.mark(sources.values()))
                try:
                    known, pieces = self._on_device(base, version, entries, nbytes, sources)
                    kept = self._keep(pieces, undo)
                finally:
                    hashes, last = copying.result()
                    copy_out.settle(sources.values(), last)
                if copied:
                    copied()
                made = manifest.make(
                    version=version, entries=entries, nbytes=nbytes, chunk_bytes=self.chunk_bytes,
                    chunks=tuple(h.result() for h in hashes),
                )  # fmt: skip
                if base and not known:
                    blob = delta.encode(base.buffer.data, buffer.data, made, spread=self._pool.map)
                    kept = self._keep(None if blob is None else [blob], undo)
                published = self._published(made, buffer, base, kept)
                undo.pop_all()
            self.readable, self._spare = (published, *self.readable[:1]), None
            return made

    def close(self) -> None:
        """Withdraw everything. Responses under way break off at their next piece."""
        with self._lock:
            gone, self.readable, self._closed = self.readable, (), True
            for p in gone:
                self._drop(p.buffer)
                if p.delta_buffer:
                    p.delta_buffer.close()
            if self._spare:
                self._drop(self._spare)
            self._spare = None
            self._pool.shutdown()
            self._side.shutdown()

    def _layout(
        self, tensors: Mapping[str, torch.Tensor]
    ) -> tuple[tuple[TensorEntry, ...], int, dict[TensorEntry, torch.Tensor]]:
        if not tensors:
            raise WindfallError("no tensors to publish", where="weights", fix="Give the module's state_dict().")
        rows, storages = [], {}
        for name, t in tensors.items():
            if t.device.type == "meta" or not hasattr(t, "data_ptr"):
                raise WindfallError(f"tensor {name!r} has no values", where="weights", fix="Load the model first.")
            dtype = self.dtype if self.dtype and t.is_floating_point() else str(t.dtype).removeprefix("torch.")
            same = (t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) if t.numel() else name
            rows.append((name, dtype, tuple(t.shape), storages.setdefault(same, len(storages))))
        entries, nbytes = manifest.layout(rows)
        first = {storage: i for i, (*_, storage) in reversed(list(enumerate(rows)))}
        return entries, nbytes, {entries[i]: tensors[entries[i].name] for i in first.values()}

    def _take(self, nbytes: int, entries: tuple[TensorEntry, ...]) -> Buffer:
        """The spare buffer, withdrawn, with zeros between its tensors."""
        if len(self.readable) == 2:
            old, self.readable = self.readable[1], self.readable[:1]
            self._spare = old.buffer
            if old.delta_buffer:
                old.delta_buffer.close()
            if old.manifest.entries == entries:
                return self._spare
        if self._spare and self._spare.nbytes == nbytes:
            self._spare.data[:] = 0  # what another layout left between the tensors would change the checksums
            return self._spare
        if self._spare:
            self._drop(self._spare)
        self._spare = None
        self._spare = Buffer(nbytes, self.folder)
        return self._spare

    def _copy(
        self, buffer: Buffer, sources: dict[TensorEntry, torch.Tensor], after: Any
    ) -> tuple[list[Future[int]], Any]:
        """Begin to fill the buffer, and to hash it: every chunk as soon as it is there. Returns the checksums to come,
        and the event after which all bytes are there (None: they are)."""
        if after is not None:
            self._pin(buffer)
        hashes: list[Future[int]] = []
        chunks, event = self._chunks(buffer.nbytes), None
        for end, event in copy_out.copy(buffer, sources, after):
            there = len(chunks) if end == buffer.nbytes else end // self.chunk_bytes
            for start in chunks[len(hashes) : there]:
                hashes.append(self._pool.submit(self._hash, buffer.data, start, event))
        return hashes, event

    def _on_device(
        self, base: Published | None, version: int, entries: tuple[TensorEntry, ...], nbytes: int,
        sources: dict[TensorEntry, torch.Tensor],
    ) -> tuple[bool, list[Any] | None]:  # fmt: skip
        """Whether the delta could be found on the tensors' device, and the delta."""
        import torch

        try:
            shadow = self._shadow_of(entries, nbytes, {t.device for t in sources.values()})
            if shadow is None:
                return False, None
            known = base is not None and shadow.version == base.manifest.version
            pieces = shadow.encode(sources, base.manifest) if base and known else None
            shadow.take(sources, version)
        except torch.OutOfMemoryError:  # others have taken the room: from now on the buffers are compared
            self._shadow, self._wants_shadow = None, False
            return False, None
        return known, pieces

    def _shadow_of(self, entries: tuple[TensorEntry, ...], nbytes: int, devices: set[torch.device]) -> Any:
        """The device's copy of the version before; a new one, of nothing yet, if the layout is new; or None."""
        if not self.with_delta or self._wants_shadow is False or len(devices) != 1 or not nbytes:
            return None
        (device,) = devices
        if self._shadow is None or self._shadow.entries != entries or self._shadow.device != device:
            from windfall.weights.device_delta import Shadow, room

            self._shadow = None
            if self._wants_shadow or room(nbytes, device):
                self._shadow = Shadow(entries, nbytes, device)
        return self._shadow

    def _pin(self, buffer: Buffer) -> None:
        """Lock the buffer's pages for the GPU, once: a copy into other memory is several times slower."""
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

    def _keep(self, pieces: list[Any] | None, undo: ExitStack) -> Buffer | None:
        """A delta, where it can be read from."""
        if pieces is None:
            return None
        kept, at = Buffer(sum(map(len, pieces)), self.folder), 0
        undo.callback(kept.close)
        parts = []
        for piece in pieces:
            data = memoryview(piece)
            parts += [(at + i, data[i : i + KEEP_BYTES]) for i in range(0, len(data), KEEP_BYTES)]
            at += len(data)
        # By the descriptor, since the kernel writes to a file faster than it maps new pages of one.
        for _ in self._pool.map(lambda part: _write(kept.fd, *part), parts):
            pass
        return kept

    def _published(self, made: Manifest, buffer: Buffer, base: Published | None, kept: Buffer | None) -> Published:
        if base is None or kept is None:
            return Published(manifest=made, encoded=made.encode(), buffer=buffer)
        described = DeltaManifest(
            base=base.manifest.digest, digest=made.digest, nbytes=kept.nbytes, chunk_bytes=self.chunk_bytes,
            chunks=self._hashes(kept.data),
        )  # fmt: skip
        return Published(
            manifest=made, encoded=made.encode(), buffer=buffer, delta=described, delta_encoded=described.encode(),
            delta_buffer=kept,
        )  # fmt: skip

    def _chunks(self, nbytes: int) -> range:
        return range(0, nbytes, self.chunk_bytes)

    def _hashes(self, data: np.ndarray) -> tuple[int, ...]:
        return tuple(self._pool.map(lambda at: self._hash(data, at, None), self._chunks(len(data))))

    def _hash(self, data: np.ndarray, at: int, there: Any) -> int:
        if there is not None:
            there.synchronize()
        return xxhash.xxh3_64_intdigest(data[at : at + self.chunk_bytes].data)


def _write(fd: int, at: int, data: memoryview) -> None:
    while data:
        done = os.pwrite(fd, data, at)
        at, data = at + done, data[done:]
