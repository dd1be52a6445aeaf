"""Puts versions of the weights where workers can pull them, while training goes on.

There are two buffers. `publish` writes into the one that is not current and makes it current in one assignment, so
that a reader sees the old version or the new one, never a mixture. Rules:

- two versions can be read: the current one and the one before, until `publish` needs its buffer; it is withdrawn
  before the first byte of it is written, and nobody waits for its readers: they find out by status or by checksum;
- a tensor is written once, however many names it has;
- the delta against the version before is part of the version: both are there, or neither.

`publish` may run in a thread beside the event loop that serves; copying, hashing and comparing let go of the
interpreter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from windfall.errors import WindfallError
from windfall.weights import delta, manifest
from windfall.weights.manifest import DeltaManifest, Entry, Manifest
from windfall.weights.memory import Buffer

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20


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
    ) -> None:
        if dtype is not None:
            manifest.width(dtype, "all")
        self.folder, self.dtype, self.chunk_bytes, self.with_delta = folder, dtype, chunk_bytes, delta
        self.readable: tuple[Published, ...] = ()
        """Newest first. Replaced as a whole, so that any thread may look."""
        self._spare: Buffer | None = None
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), thread_name_prefix="publish")
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
            self._copy(buffer, sources)
            if copied:
                copied()
            made = self._make(version, entries, nbytes, buffer, before)
            self.readable, self._spare = (made, *self.readable[:1]), None
            return made.manifest

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

    def _layout(self, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Entry, ...], int, dict[Entry, torch.Tensor]]:
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

    def _take(self, nbytes: int, entries: tuple[Entry, ...]) -> Buffer:
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

    def _copy(self, buffer: Buffer, sources: dict[Entry, torch.Tensor]) -> None:
        import torch

        devices = {t.device for t in sources.values() if t.device.type == "cuda"}
        if devices:
            self._pin(buffer)

        for entry, source in sources.items():
            if entry.nbytes:
                flat = torch.from_numpy(buffer.data[entry.offset : entry.offset + entry.nbytes])
                target = flat.view(getattr(torch, entry.dtype)).view(entry.shape)
                # From a GPU: cast there, then copied while the next one is cast; one wait for all of them below.
                target.copy_(source.detach(), non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)

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

    def _make(
        self, version: int, entries: tuple[Entry, ...], nbytes: int, buffer: Buffer, before: Published | None
    ) -> Published:
        made = manifest.make(
            version=version, entries=entries, nbytes=nbytes, chunk_bytes=self.chunk_bytes,
            chunks=self._hashes(buffer.data),
        )  # fmt: skip
        plain = Published(manifest=made, encoded=made.encode(), buffer=buffer)
        if not self.with_delta or before is None or before.manifest.entries != entries:
            return plain
        blob = delta.encode(before.buffer.data, buffer.data, made, spread=self._pool.map)
        if blob is None:
            return plain
        kept = Buffer(len(blob), self.folder)
        kept.data[:] = np.frombuffer(blob, np.uint8)
        described = DeltaManifest(
            base=before.manifest.digest, digest=made.digest, nbytes=len(blob), chunk_bytes=self.chunk_bytes,
            chunks=self._hashes(kept.data),
        )  # fmt: skip
        return Published(
            manifest=made, encoded=plain.encoded, buffer=buffer, delta=described, delta_encoded=described.encode(),
            delta_buffer=kept,
        )  # fmt: skip

    def _hashes(self, data: np.ndarray) -> tuple[int, ...]:
        step = self.chunk_bytes
        return tuple(
            self._pool.map(lambda a: xxhash.xxh3_64_intdigest(data[a : a + step].data), range(0, len(data), step))
        )
