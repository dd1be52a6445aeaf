"""Pulls a version of the weights from weight servers into a local buffer. Runs in a thread of the worker.

Rules:

- `held` is the manifest of the version in the buffer, with every chunk verified. It is None during a pull and after a
  failed one;
- weights are used only if their manifest has the digest that the caller received over a link that it trusts;
- chunks that the buffer already holds, verified, are not downloaded: those of a failed pull, and unchanged ones;
- a delta is used if its base is exactly the held version and it is smaller than the missing chunks. Its result is
  verified like a full copy, and wrong chunks are downloaded;
- if the manifest names several servers, chunks come from all of them at once, and each has its own delta;
- the base of an adapter is pulled once, before the adapter, and kept in a buffer of its own. Its digest is part of the
  adapter's digest.
"""

from __future__ import annotations

import contextlib
import mmap
import ssl as tls
import threading
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import xxhash

from windfall.errors import WindfallError
from windfall.weights import delta, manifest
from windfall.weights.buffers import Buffer, views
from windfall.weights.download import (
    Address,
    Download,
    PullDamaged,
    PullFailed,
    PullGone,
    Retry,
    download_manifest,
    parse_address,
)
from windfall.weights.manifest import Manifest
from windfall.weights.shared import BufferTensors, SharedTensors

if TYPE_CHECKING:
    import torch

__all__ = ["PullDamaged", "PullFailed", "PullGone", "Puller"]


class Puller:
    def __init__(
        self,
        *,
        key: str,
        parallel: int = 4,
        timeout_s: float = 20.0,
        tries: int = 5,
        ssl: tls.SSLContext | None = None,
        shared: bool = False,
    ) -> None:
        """`shared`: other processes of this machine can map the pulled weights."""
        if not (key.isascii() and key.isprintable() and key) or parallel < 1 or tries < 1 or timeout_s <= 0:
            what = "a puller needs a printable key, and values above zero for parallel, tries and timeout_s"
            raise WindfallError(what, where="weights")
        self.key = key
        self.parallel = parallel
        self.timeout_s = timeout_s
        self.tries = tries
        self.ssl = ssl
        self.bytes_received = self.delta_used = self.retries = 0  # bytes_received grows during a pull
        self._weights, self._base = LocalCopy(shared=shared), LocalCopy()
        self._lock, self._count_lock = threading.Lock(), threading.Lock()

    @property
    def held(self) -> Manifest | None:
        return self._weights.held

    def pull(self, url: str, version: int, digest: str, *, stop: threading.Event | None = None) -> Manifest:
        """Raises PullFailed, or PullGone if the version is withdrawn. `stop` ends the pull at its next read or wait."""
        with self._lock:
            held = self._weights.held
            if held is None or held.digest != digest:
                to = self._address(url)
                self._pull(to, digest, stop or threading.Event())
                held = self._weights.held
            assert held is not None
            self._weights.held = msgspec.structs.replace(held, version=version)
            return self._weights.held

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name. They are valid until the next `pull` starts."""
        return self._weights.tensors()

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """The weights that the held adapter applies to, like `tensors`. They are valid until an adapter of another base
        is pulled. Raises WindfallError if the held version is not an adapter."""
        if self._weights.held is not None and not self._weights.held.base:
            raise WindfallError("the held version is not an adapter", where="weights", fix="Use tensors().")
        return self._base.tensors()

    def _address(self, url: str) -> Address:
        return parse_address(url, key=self.key, timeout_s=self.timeout_s, tls=self.ssl)

    def _pull(self, to: Address, digest: str, stop: threading.Event) -> None:
        wanted = self._get_manifest(to, f"/weights/{digest}/manifest", digest, stop)
        if wanted.base and (self._base.held is None or self._base.held.digest != wanted.base):
            base = self._get_manifest(to, f"/weights/{wanted.base}/manifest", wanted.base, stop)
            self._pull_into(self._base, to, base, stop)
        self._pull_into(self._weights, to, wanted, stop)

    def _pull_into(self, copy: LocalCopy, to: Address, wanted: Manifest, stop: threading.Event) -> None:
        held, copy.held = copy.held, None
        copy.prepare(wanted)
        if held and held.entries == wanted.entries and held.chunk_bytes == wanted.chunk_bytes:
            self._apply_delta(copy, to, held, wanted, stop)
        self._download(to, copy.view, wanted, copy.verified, stop)
        copy.held = wanted

    def _apply_delta(
        self, copy: LocalCopy, to: Address, held: Manifest, wanted: Manifest, stop: threading.Event
    ) -> None:
        """Update the buffer toward `wanted` with a delta, if there is one and it is smaller than the missing chunks.
        After any failure, the full download corrects the buffer."""
        missing = sum(
            stop - start
            for (start, stop), has, wants in zip(
                pairwise(wanted.bounds()), copy.verified, wanted.checksums(), strict=True
            )
            if has != wants
        )
        try:
            found = self._get_manifest(to, f"/weights/{wanted.digest}/delta/{held.digest}", "", stop)
            if found.nbytes >= missing or (found.before, found.after) != (held.digest, wanted.digest):
                return
            blob = memoryview(bytearray(found.nbytes))
            self._download(to, blob, found, [None] * len(found.checksums()), stop)
            with ThreadPoolExecutor(self.parallel) as pool:
                delta.apply(copy.view, blob, wanted, pool.map)
                copy.verified[:] = [None] * len(copy.verified)
                copy.hash_all(pool)
        except (PullGone, PullDamaged, WindfallError):
            return  # the buffer is as before
        self.delta_used += copy.verified == wanted.checksums()

    def _get_manifest(self, to: Address, path: str, digest: str, stop: threading.Event) -> Manifest:
        retry = Retry(self.tries, stop, stop.is_set)
        try:
            got, received = download_manifest(to, path, retry, lambda data: manifest.decode(data, digest))
        finally:
            self._count(retries=retry.total)
        self._count(received)
        return got

    def _download(
        self,
        to: Address,
        view: memoryview,
        source: Manifest,
        verified: list[int | None],
        stop: threading.Event,
    ) -> None:
        path = f"/weights/{source.digest}"
        try:
            servers = [self._address(server) if server else to for server in source.servers] or [to]
        except WindfallError as e:
            raise PullFailed(f"the manifest of {path} from {to.name} names a wrong server: {e}") from e
        download = Download(servers, path, view, source, verified, tries=self.tries, stop=stop, on_bytes=self._count)
        try:
            download.run(self.parallel)
        finally:
            self._count(retries=download.retries)

    def _count(self, received: int = 0, retries: int = 0) -> None:
        with self._count_lock:
            self.bytes_received += received
            self.retries += retries


class LocalCopy:
    """A worker's copy of some weights: one buffer, and which of its chunks are verified."""

    def __init__(self, *, shared: bool = False) -> None:
        """`shared`: other processes of this machine can map the buffer (shared.py)."""
        self._shared = shared
        self._file: Buffer | None = None  # what they map
        self.held: Manifest | None = None  # what the buffer holds, with every chunk verified
        self.verified: list[int | None] = []  # checksums of the chunks in the buffer; None: not verified
        self.view = memoryview(b"")
        self._buffer = mmap.mmap(-1, 1)
        self._bounds: list[int] = []

    def prepare(self, wanted: Manifest) -> None:
        """Make the buffer as large as the wanted weights. Chunks that have the same place in both stay verified."""
        known: dict[tuple[int, int], int | None] = {}
        if len(self.view) == wanted.nbytes:
            known = dict(zip(pairwise(self._bounds), self.verified, strict=True))
        else:
            self._resize(wanted.nbytes)
        self._bounds = wanted.bounds()
        self.verified = [known.get(chunk) for chunk in pairwise(self._bounds)]

    def hash_all(self, pool: Executor) -> None:
        """Compute the checksums of all chunks in the buffer again."""
        chunks = list(pairwise(self._bounds))
        self.verified[:] = pool.map(lambda chunk: xxhash.xxh3_64_intdigest(self.view[chunk[0] : chunk[1]]), chunks)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name."""
        if self.held is None:
            raise WindfallError("no complete version is held", where="weights", fix="Pull one first.")
        tensors = views(self._buffer, self.held.entries)
        if self._file is None:
            return tensors
        return BufferTensors(tensors, SharedTensors(self._file.handle, self.held.entries))

    def _resize(self, nbytes: int) -> None:
        try:
            if self._shared:
                if self._file is not None:
                    self._file.close()
                self._file = Buffer(nbytes, used=())
            self._buffer = mmap.mmap(-1, max(nbytes, 1)) if self._file is None else self._file.mapped
        except (OSError, OverflowError) as e:
            raise WindfallError(f"no room for {nbytes / 1e9:.2f} GB of weights: {e}", where="weights") from e
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._buffer)[:nbytes]
