"""Gets a version of the weights from a weight server into a buffer of one's own. Meant to run in a thread.

Rules:

- `held` names what the buffer holds, every chunk verified; while a pull is under way or broke off it is None;
- nothing is used whose manifest has not the digest that the caller was told over a link it trusts;
- chunks that the buffer already has, verified, are not fetched: what a broken pull left, and what did not change;
- a delta is used when it is from exactly what is held and smaller than what is missing; its result is verified like a
  full copy, and what is wrong in it is fetched.
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
from windfall.weights.connection import Address, ConnectionBroken, PullDamaged, PullFailed, PullGone, address
from windfall.weights.download import Fetch, Retry, small
from windfall.weights.manifest import DeltaManifest, Manifest

if TYPE_CHECKING:
    import torch

__all__ = ["PullDamaged", "PullFailed", "PullGone", "Puller"]
T = TypeVar("T")


class Puller:
    def __init__(
        self,
        *,
        key: str,
        parallel: int = 4,
        timeout_s: float = 20.0,
        tries: int = 5,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        if not (key.isascii() and key.isprintable() and key) or parallel < 1 or tries < 1 or timeout_s <= 0:
            raise WindfallError(
                "a puller needs a printable key, and parallel, tries and timeout_s above zero", where="weights"
            )
        self.key, self.parallel, self.timeout_s, self.tries, self.ssl = key, parallel, timeout_s, tries, ssl
        self.held: Manifest | None = None
        self.bytes_received = self.delta_used = self.retries = 0  # the first grows while a pull is under way
        self._buffer = mmap.mmap(-1, 1)
        self._view = memoryview(self._buffer)[:0]
        self._have: list[int | None] = []
        """Checksums of the chunks that the buffer holds; None where that is not known."""
        self._chunk_bytes = 0
        self._lock = threading.Lock()

    def pull(self, url: str, version: int, digest: str, *, stop: threading.Event | None = None) -> Manifest:
        """Hold this version, or raise PullGone (withdrawn) or PullFailed. `stop` ends it at its next read or wait."""
        with self._lock:
            if self.held is None or self.held.digest != digest:
                to = address(url, key=self.key, timeout_s=self.timeout_s, tls=self.ssl)
                self._pull(to, version, digest, stop or threading.Event())
            assert self.held is not None
            self.held = msgspec.structs.replace(self.held, version=version)
            return self.held

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name. They are the held version's until the next `pull` begins."""
        import torch

        if self.held is None:
            raise WindfallError("no whole version is held", where="weights", fix="Pull one first.")
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
            got = manifest.decode(data)
            if got.digest != digest or got.version != version:
                raise ConnectionBroken(
                    f"{to.name} has version {got.version} with digest {got.digest}, not {version}, {digest}"
                )
            return got

        wanted = self._small(to, f"{base}/manifest", stop, parse)
        held, self.held = self.held, None
        self._make_room(wanted)
        if held and held.entries == wanted.entries and held.chunk_bytes == wanted.chunk_bytes:
            self._by_delta(to, base, held, wanted, stop)
        self._fetch(to, f"{base}/full", self._view, wanted, self._have, stop)
        self.held = wanted

    def _by_delta(self, to: Address, base: str, held: Manifest, wanted: Manifest, stop: threading.Event) -> None:
        """Bring the buffer as near to `wanted` as a delta can. Whatever fails here, the full copy makes good."""
        path, size = f"{base}/delta/{held.digest}", wanted.chunk_bytes
        missing = size * sum(a != b for a, b in zip(self._have, wanted.chunks, strict=True))

        def parse(data: bytes) -> DeltaManifest:
            got = manifest.decode_delta(data)
            if (got.base, got.digest) != (held.digest, wanted.digest):
                raise ConnectionBroken(f"{to.name} has another delta at {path}")
            return got

        try:
            described = self._small(to, f"{path}/manifest", stop, parse)
            if described.nbytes >= missing:
                return
            blob = memoryview(bytearray(described.nbytes))
            self._fetch(to, path, blob, described, [None] * len(described.chunks), stop)
        except (PullGone, PullDamaged):
            return
        known, self._have[:] = self._have[:], [None] * len(self._have)
        try:
            delta.apply(self._view, blob, wanted)
        except WindfallError:  # refused before anything was written
            self._have[:] = known
            return
        with ThreadPoolExecutor(self.parallel) as pool:
            places = range(0, wanted.nbytes, size)
            self._have[:] = pool.map(lambda a: xxhash.xxh3_64_intdigest(self._view[a : a + size]), places)
        self.delta_used += self._have == list(wanted.chunks)

    def _make_room(self, wanted: Manifest) -> None:
        if len(self._view) != wanted.nbytes:
            try:
                self._buffer = mmap.mmap(-1, max(wanted.nbytes, 1))
            except (OSError, OverflowError) as e:
                raise WindfallError(f"no room for {wanted.nbytes / 1e9:.2f} GB of weights: {e}", where="weights") from e
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    self._buffer.madvise(mmap.MADV_HUGEPAGE)
            self._view = memoryview(self._buffer)[: wanted.nbytes]
            self._have = [None] * len(wanted.chunks)
        elif self._chunk_bytes != wanted.chunk_bytes:
            self._have = [None] * len(wanted.chunks)
        self._chunk_bytes = wanted.chunk_bytes

    def _small(self, to: Address, path: str, stop: threading.Event, parse: Callable[[bytes], T]) -> T:
        def tolerant(data: bytes) -> T:
            try:
                return parse(data)
            except WindfallError as e:  # damaged on the way, perhaps: another try may do better
                raise ConnectionBroken(str(e)) from e

        retry = Retry(self.tries, stop, stop.is_set)
        try:
            got, received = small(to, path, manifest.MAX_MANIFEST_BYTES, retry, tolerant)
        finally:
            self.retries += retry.total
        self.bytes_received += received
        return got

    def _fetch(
        self, to: Address, path: str, view: memoryview, what: Manifest | DeltaManifest, have: list[int | None],
        stop: threading.Event,
    ) -> None:  # fmt: skip
        fetch = Fetch(
            to, path, view, what.chunks, what.chunk_bytes, have, tries=self.tries, stop=stop, moved=self._moved
        )
        try:
            fetch.run(self.parallel)
        finally:
            self.retries += fetch.retries

    def _moved(self, count: int) -> None:
        self.bytes_received += count
