"""Pulls a version of the weights from a weight server into a local buffer. Runs in a thread of the worker.

Rules:

- `held` is the manifest of the version in the buffer, with every chunk verified. It is None during a pull and after a
  failed one;
- weights are used only if their manifest has the digest that the caller received over a link that it trusts;
- chunks that the buffer already holds, verified, are not downloaded: those of a failed pull, and unchanged ones;
- a delta is used if its base is exactly the held version and it is smaller than the missing chunks. Its result is
  verified like a full copy, and wrong chunks are downloaded.
"""

from __future__ import annotations

import contextlib
import mmap
import ssl as tls
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import msgspec
import xxhash

from windfall.errors import WindfallError
from windfall.weights import delta, manifest
from windfall.weights.connection import Address, ConnectionBroken, PullDamaged, PullFailed, PullGone, parse_address
from windfall.weights.download import Download, Retry, download_manifest
from windfall.weights.manifest import ChunkedManifest, DeltaManifest, Manifest

if TYPE_CHECKING:
    import torch

__all__ = ["PullDamaged", "PullFailed", "PullGone", "Puller"]
T = TypeVar("T")


class Puller:
    def __init__(
        self, *, key: str, parallel: int = 4, timeout_s: float = 20.0, tries: int = 5, ssl: tls.SSLContext | None = None
    ) -> None:
        if not (key.isascii() and key.isprintable() and key) or parallel < 1 or tries < 1 or timeout_s <= 0:
            what = "a puller needs a printable key, and values above zero for parallel, tries and timeout_s"
            raise WindfallError(what, where="weights")
        self.key, self.parallel, self.timeout_s, self.tries, self.ssl = key, parallel, timeout_s, tries, ssl
        self.held: Manifest | None = None
        self.bytes_received = self.delta_used = self.retries = 0  # bytes_received grows during a pull
        self._buffer = mmap.mmap(-1, 1)
        self._view = memoryview(self._buffer)[:0]
        self._verified: list[int | None] = []  # checksums of the chunks in the buffer; None: not verified
        self._chunk_bytes = 0
        self._lock = threading.Lock()

    def pull(self, url: str, version: int, digest: str, *, stop: threading.Event | None = None) -> Manifest:
        """Raises PullFailed, or PullGone if the version is withdrawn. `stop` ends the pull at its next read or wait."""
        with self._lock:
            if self.held is None or self.held.digest != digest:
                to = parse_address(url, key=self.key, timeout_s=self.timeout_s, tls=self.ssl)
                self._pull(to, version, digest, stop or threading.Event())
            assert self.held is not None
            self.held = msgspec.structs.replace(self.held, version=version)
            return self.held

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name. They are valid until the next `pull` starts."""
        import torch

        if self.held is None:
            raise WindfallError("no complete version is held", where="weights", fix="Pull one first.")
        out = {}
        for e in self.held.entries:
            kind = getattr(torch, e.dtype)
            count = e.nbytes // manifest.WIDTHS[e.dtype]
            flat = torch.frombuffer(self._buffer, dtype=kind, count=count, offset=e.offset) if count else None
            out[e.name] = torch.empty(e.shape, dtype=kind) if flat is None else flat.view(e.shape)
        return out

    def _pull(self, to: Address, version: int, digest: str, stop: threading.Event) -> None:
        base = f"/weights/{version}"

        def parse(data: bytes) -> Manifest:
            got = manifest.decode(data, Manifest)
            if got.digest != digest or got.version != version:
                has = f"version {got.version} with digest {got.digest}"
                raise ConnectionBroken(f"{to.name} has {has}, expected {version}, {digest}")
            return got

        wanted = self._download_manifest(to, f"{base}/manifest", stop, parse)
        held, self.held = self.held, None
        self._resize(wanted)
        if held and held.entries == wanted.entries and held.chunk_bytes == wanted.chunk_bytes:
            self._apply_delta(to, base, held, wanted, stop)
        self._download(to, f"{base}/full", self._view, wanted, self._verified, stop)
        self.held = wanted

    def _apply_delta(self, to: Address, base: str, held: Manifest, wanted: Manifest, stop: threading.Event) -> None:
        """Update the buffer toward `wanted` with a delta. After any failure, the full download corrects the buffer."""
        path, size = f"{base}/delta/{held.digest}", wanted.chunk_bytes
        missing = size * sum(a != b for a, b in zip(self._verified, wanted.chunks, strict=True))

        def parse(data: bytes) -> DeltaManifest:
            got = manifest.decode(data, DeltaManifest)
            if (got.base, got.digest) != (held.digest, wanted.digest):
                raise ConnectionBroken(f"{to.name} has a different delta at {path}")
            return got

        try:
            delta_manifest = self._download_manifest(to, f"{path}/manifest", stop, parse)
            if delta_manifest.nbytes >= missing:
                return
            blob = memoryview(bytearray(delta_manifest.nbytes))
            self._download(to, path, blob, delta_manifest, [None] * len(delta_manifest.chunks), stop)
        except (PullGone, PullDamaged):
            return
        before, self._verified[:] = self._verified[:], [None] * len(self._verified)
        try:
            delta.apply(self._view, blob, wanted)
        except WindfallError:  # refused before the buffer was changed
            self._verified[:] = before
            return
        with ThreadPoolExecutor(self.parallel) as pool:
            starts = range(0, wanted.nbytes, size)
            self._verified[:] = pool.map(lambda a: xxhash.xxh3_64_intdigest(self._view[a : a + size]), starts)
        self.delta_used += self._verified == list(wanted.chunks)

    def _resize(self, wanted: Manifest) -> None:
        resized = len(self._view) != wanted.nbytes
        if resized:
            try:
                self._buffer = mmap.mmap(-1, max(wanted.nbytes, 1))
            except (OSError, OverflowError) as e:
                raise WindfallError(f"no room for {wanted.nbytes / 1e9:.2f} GB of weights: {e}", where="weights") from e
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    self._buffer.madvise(mmap.MADV_HUGEPAGE)
            self._view = memoryview(self._buffer)[: wanted.nbytes]
        if resized or self._chunk_bytes != wanted.chunk_bytes:
            self._verified = [None] * len(wanted.chunks)
        self._chunk_bytes = wanted.chunk_bytes

    def _download_manifest(self, to: Address, path: str, stop: threading.Event, parse: Callable[[bytes], T]) -> T:
        retry = Retry(self.tries, stop, stop.is_set)
        try:
            got, received = download_manifest(to, path, retry, parse)
        finally:
            self.retries += retry.total
        self.bytes_received += received
        return got

    def _download(
        self, to: Address, path: str, view: memoryview, source: ChunkedManifest, verified: list[int | None],
        stop: threading.Event,
    ) -> None:  # fmt: skip
        options = {"tries": self.tries, "stop": stop, "on_bytes": self._count_bytes}
        download = Download(to, path, view, source, verified, **options)
        try:
            download.run(self.parallel)
        finally:
            self.retries += download.retries

    def _count_bytes(self, count: int) -> None:
        self.bytes_received += count
