"""Pulls versions of the weights into a local buffer, from the sources that the controller names. Runs in a thread.

A load names files, in the order of reading: the base of an adapter, then one full copy, or deltas from what is held.
Rules:

- `held` is the manifest of the version in the buffer, with every chunk verified. It is None while the buffer changes,
  and after a failed pull;
- weights are used only if their manifest has the digest that the caller received over a link that it trusts;
- chunks that the buffer already holds, verified, are not read: those of a failed pull, and unchanged ones;
- deltas are read first, then applied together. The result is verified; if chunks are wrong, or a delta could not be
  read, the rest comes from the full copy, whose sources the reader asks for;
- the base of an adapter is kept in a buffer of its own, one for all adapters of this process (`beside`). Its digest is
  part of the adapter's digest;
- all that is verified can be read by others (`files`, which serve.py serves), also during the pull. Before its buffer
  changes, a file is withdrawn. Deltas stay readable: those of the last pull, and older ones of a quarter of the copy;
- with `need`, only the chunks that a layout touches are read, and only they have memory.
"""

from __future__ import annotations

import contextlib
import mmap
import ssl as tls
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.weights import delta
from windfall.weights.buffers import Buffer, views
from windfall.weights.download import Download, read_manifest
from windfall.weights.file_sources import Ask, FileSources, PullFailed
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.manifest import Manifest, decode
from windfall.weights.shared import BufferTensors, SharedTensors
from windfall.weights.slices import Layout, chunk_ranges, layout_ranges
from windfall.weights.source import Source, connect

if TYPE_CHECKING:
    import torch

__all__ = ["Ask", "PullFailed", "PulledFiles", "Puller"]
WITHDRAW_S = 1.0
"""How long others may go on reading a file before its buffer changes (seconds)."""
NO_ROUTE = m.ReadRoute(sources=(), parts=())


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledFiles:
    """What a pull did."""

    manifest: Manifest
    used: tuple[m.SourceUse, ...] = ()
    """What came from each source since the last report."""
    apply_s: float = 0.0
    """Seconds that applying deltas took."""


class Puller:
    reads = True

    def __init__(
        self,
        *,
        key: str,
        parallel: int = 4,
        timeout_s: float = 20.0,
        tries: int = 5,
        ssl: tls.SSLContext | None = None,
        need: Layout | None = None,
        files: HeldFiles | None = None,
        base: LocalCopy | None = None,
    ) -> None:
        """`parallel`: connections at the start of a read. `need`: slices of the tensors, if not all are needed. `files`
        and `base`: those of another puller (`beside`)."""
        if not (key.isascii() and key.isprintable() and key) or parallel < 1 or tries < 1 or timeout_s <= 0:
            what = "a puller needs a printable key, and values above zero for parallel, tries and timeout_s"
            raise WindfallError(what, where="weights")
        self.key = key
        self.parallel = parallel
        self.timeout_s = timeout_s
        self.tries = tries
        self.ssl = ssl
        self.files = files or HeldFiles()
        self.bytes_received = self.delta_used = self.retries = 0  # bytes_received grows during a pull
        self._weights, self._base = LocalCopy(self.files, need), base or LocalCopy(self.files)
        self._deltas: list[HeldFile] = []  # oldest first
        self._routes: dict[str, m.ReadRoute] = {}
        self._reading: dict[str, FileSources] = {}
        self._used: list[m.SourceUse] = []
        self._lock, self._count_lock = threading.Lock(), threading.Lock()

    @property
    def held(self) -> Manifest | None:
        return self._weights.held

    def beside(self) -> Puller:
        """A puller of another policy in this process. Both have the same files and the same base, so they must not pull
        at the same time."""
        options = {"parallel": self.parallel, "timeout_s": self.timeout_s, "tries": self.tries, "ssl": self.ssl}
        return Puller(key=self.key, files=self.files, base=self._base, **options)

    def close(self) -> None:
        """Free what is held, apart from the base."""
        self._weights.close()
        self._drop_deltas(0, -1)

    def pull(self, load: m.Load, ask: Ask | None = None, *, stop: threading.Event | None = None) -> PulledFiles:
        """`ask`: as in FileSources; answers come by `reroute`. `stop` ends the pull at its next read or wait. Raises
        PullFailed."""
        with self._lock:
            self._ask, self._stop = ask, stop or threading.Event()
            self._routes = {each.file.digest: each.route for each in load.files}
            self._used, apply_s, self._received_s = [], 0.0, time.monotonic()
            deltas = [each.file for each in load.files if each.file.after]
            if deltas and (self.held is None or self.held.digest != load.digest):
                if deltas[0].before in self._routes:
                    self._read_copy(self._weights, deltas[0].before)
                apply_s = self._update(deltas, load.digest)
            made = msgspec.structs.replace(self._read_copy(self._weights, load.digest), version=load.version)
            if made.base:
                self._read_copy(self._base, made.base)
            self._weights.held = made
            return PulledFiles(manifest=made, used=tuple(self._used), apply_s=apply_s)

    def reroute(self, routed: m.Routed) -> None:
        """Other sources of a file. Any thread may call it."""
        self._routes[routed.file] = routed.route
        if (reading := self._reading.get(routed.file)) is not None:
            reading.reroute(routed.route)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name. They are valid until the next `pull` starts."""
        return self._weights.tensors()

    def base_tensors(self) -> dict[str, torch.Tensor]:
        """The weights that the held adapter applies to, like `tensors`. They are valid until an adapter of another base
        is pulled. Raises WindfallError if the held version is not an adapter."""
        if self._weights.held is not None and not self._weights.held.base:
            raise WindfallError("the held version is not an adapter", where="weights", fix="Use tensors().")
        return self._base.tensors()

    def _read_copy(self, copy: LocalCopy, file: str) -> Manifest:
        if copy.held is None or copy.held.digest != file:
            with self._sources(file) as sources:
                wanted = read_manifest(sources)
                missing = copy.begin(wanted)
                Download(sources, wanted, copy.view, missing, copy.add).run(self.parallel)
                copy.held = wanted
        return copy.held

    def _update(self, deltas: list[m.FileRef], digest: str) -> float:
        """Bring the buffer to the weights with this digest, as far as deltas do. Returns how long applying them took
        (seconds)."""
        copy = self._weights
        if copy.held is None or copy.held.digest != deltas[0].before:
            return 0.0
        try:
            blobs = [self._read_delta(each.digest) for each in deltas]
            began_s, wanted = time.monotonic(), decode(blobs[-1].manifest.result, digest)
        except (PullFailed, WindfallError):
            if self._stop.is_set():
                raise
            return 0.0
        # In a chain, a delta may change a chunk and the next one change it back.
        missing = copy.begin(wanted, reuse=len(blobs) == 1)
        with ThreadPoolExecutor(self.parallel) as pool:
            with contextlib.suppress(WindfallError):  # then chunks are wrong
                for blob in blobs:
                    delta.apply(copy.view, blob.buffer.view, wanted, pool.map)
            if copy.verify(missing, pool):
                copy.held = wanted
                self.delta_used += 1
        self._drop_deltas(len(blobs), wanted.nbytes // 4)
        return time.monotonic() - began_s

    def _read_delta(self, file: str) -> HeldFile:
        held = self.files.find(file)
        with self._sources(file) as sources:
            if held is None:
                made = read_manifest(sources)
                held = HeldFile(made, Buffer(made.nbytes))
                self._deltas.append(held)
                self.files.add(held)
            Download(sources, held.manifest, held.buffer.view, held.missing(), held.add).run(self.parallel)
        return held

    def _drop_deltas(self, new: int, limit: int) -> None:
        """Drop the oldest deltas, but none of the `new` ones, until all have at most `limit` bytes."""
        while len(self._deltas) > new and sum(held.manifest.nbytes for held in self._deltas) > limit:
            oldest = self._deltas.pop(0)
            self.files.remove(oldest)
            oldest.buffer.close()

    @contextlib.contextmanager
    def _sources(self, file: str) -> Iterator[FileSources]:
        def open_source(ref: m.SourceRef, stopped: Callable[[], bool]) -> Source:
            return connect(ref, key=self.key, tls=self.ssl, timeout_s=self.timeout_s, stopped=stopped)

        route = self._routes.get(file, NO_ROUTE)
        options = {"connect": open_source, "ask": self._ask, "stop": self._stop, "tries": self.tries}
        options |= {"on_bytes": self._count, "received_s": self._received_s}
        sources = self._reading[file] = FileSources(file, route, **options)
        try:
            yield sources
        finally:
            del self._reading[file]
            self._received_s = sources.received_s
            self.retries += sources.retries
            self._used += sources.uses()

    def _count(self, received: int) -> None:
        with self._count_lock:
            self.bytes_received += received


class LocalCopy:
    """A reader's copy of some weights: one buffer, and which of its chunks are verified."""

    def __init__(self, files: HeldFiles, need: Layout | None = None) -> None:
        self.held: Manifest | None = None
        """What the buffer holds, with every chunk verified that is needed."""
        self._files = files
        self._need = need
        self._buffer = Buffer(0)
        self._file: HeldFile | None = None
        self._seals: dict[tuple[int, int], bytes] = {}
        """By range: the seal of a verified chunk in the buffer."""

    @property
    def view(self) -> memoryview:
        return self._buffer.view

    def close(self) -> None:
        self.held = None
        if self._file is not None:
            self._files.remove(self._file, WITHDRAW_S)
            self._file = None
        self._buffer.close()
        self._buffer, self._seals = Buffer(0), {}

    def begin(self, wanted: Manifest, *, reuse: bool = True) -> list[int]:
        """From now on, the buffer is for these weights. Returns the chunks that are missing: with `reuse`, not those
        that have the same bytes at the same place."""
        self.held = None
        if self._file is not None and self._file.manifest.digest != wanted.digest:
            self._files.remove(self._file, WITHDRAW_S)
            self._file = None
        if self._buffer.nbytes != wanted.nbytes:
            self._resize(wanted.nbytes)
        bounds = self._bounds = wanted.bounds()
        ranges = None
        if self._need is not None:
            ranges = chunk_ranges(layout_ranges(wanted.entries, self._need), bounds)
        self._file = self._file or HeldFile(wanted, self._buffer, ranges=ranges)
        known, self._seals = self._seals, {}
        for i, chunk in enumerate(pairwise(bounds)):
            if reuse and known.get(chunk) == wanted.seal(i):
                self.add(i)
        self._files.add(self._file)
        return self._file.missing()

    def add(self, chunk: int) -> None:
        """This chunk is verified."""
        assert self._file is not None
        self._seals[self._bounds[chunk], self._bounds[chunk + 1]] = self._file.manifest.seal(chunk)
        self._file.add(chunk)

    def verify(self, missing: Iterable[int], pool: Executor) -> bool:
        """Add those of these chunks that have the right bytes. Whether all have."""

        def check(chunk: int) -> bool:
            assert self._file is not None
            data = self.view[self._bounds[chunk] : self._bounds[chunk + 1]]
            intact = self._file.manifest.is_chunk(chunk, data, trusted=True)
            if intact:
                self.add(chunk)
            return intact

        return all(list(pool.map(check, missing)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name."""
        if self.held is None:
            raise WindfallError("no complete version is held", where="weights", fix="Pull one first.")
        shared = SharedTensors(self._buffer.handle, self.held.entries)
        return BufferTensors(views(self._buffer.mapped, self.held.entries), shared)

    def _resize(self, nbytes: int) -> None:
        self._buffer.close()
        self._buffer, self._seals = Buffer(nbytes, used=()), {}
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._buffer.mapped.madvise(mmap.MADV_HUGEPAGE)
