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
  changes, a file is withdrawn. Deltas stay readable: those of the last load, and older ones of a quarter of the copy.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import ssl as tls
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.weights import delta
from windfall.weights.buffers import Buffer, views
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.manifest import Manifest, decode
from windfall.weights.merged import MergedWeights
from windfall.weights.pulling.download import Download, read_manifest
from windfall.weights.pulling.file_sources import Ask, FileSources, PullFailed
from windfall.weights.pulling.source import connect
from windfall.weights.shared import BufferTensors, SharedTensors

if TYPE_CHECKING:
    import torch

__all__ = ["Ask", "PullFailed", "PulledWeights", "Puller", "WeightPuller"]
WITHDRAW_S = 1.0
"""How long others may go on reading a file before its buffer changes (seconds)."""
NO_ROUTE = m.ReadRoute(sources=(), parts=())


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledWeights:
    """What a pull gives to an engine."""

    digest: str
    tensors: Mapping[str, Any] | None = None
    """The weights, or an adapter with its base (MergedWeights): views that are valid until the puller's next pull. None
    if the engine already has these weights."""
    base: str = ""
    """Digest of the adapter's base."""
    bytes: int = 0
    """Bytes that were received for it."""
    used: tuple[m.SourceUse, ...] = ()
    """What came from each source since the last report."""
    apply_s: float = 0.0
    """Seconds that applying deltas took."""


class WeightPuller:
    """Where a worker's weights of one policy come from: a Puller, or the trainer of this process."""

    reads = False
    """Whether it reads from sources."""
    bytes_received = 0
    """Grows during a pull."""

    def pull(self, load: m.Load, ask: Ask | None = None, *, stop: threading.Event | None = None) -> PulledWeights:
        """Get this version. `ask` asks the controller for other sources: as in FileSources; answers come by `reroute`.
        `stop` ends the pull at its next read or wait. Raises any error if it fails."""
        raise NotImplementedError

    def reroute(self, routed: m.Routed) -> None:
        """Other sources of a file. Any thread may call it."""

    def beside(self) -> WeightPuller:
        """One more of its kind, for another policy."""
        raise NotImplementedError("the trainer's own engine holds one policy")

    def close(self) -> None:
        """Free what is held, apart from the base of adapters: the policy is no longer wanted here."""


class Puller(WeightPuller):
    reads = True

    def __init__(
        self,
        *,
        key: str,
        parallel: int = 4,
        timeout_s: float = 20.0,
        tries: int = 5,
        ssl: tls.SSLContext | None = None,
        base: LocalCopy | None = None,
    ) -> None:
        """`parallel`: connections at the start of a read. `base`: that of another puller (`beside`)."""
        if not (key.isascii() and key.isprintable() and key) or parallel < 1 or tries < 1 or timeout_s <= 0:
            what = "a puller needs a printable key, and values above zero for parallel, tries and timeout_s"
            raise WindfallError(what, where="weights")
        self.key = key
        self.parallel = parallel
        self.timeout_s = timeout_s
        self.tries = tries
        self.ssl = ssl
        self._base = base or LocalCopy(HeldFiles())
        self.files = self._base.files
        self._weights = LocalCopy(self.files)
        self.delta_used = self.retries = 0
        self._deltas: list[HeldFile] = []  # oldest first
        self._routes: dict[str, m.ReadRoute] = {}
        self._reading: dict[str, FileSources] = {}
        self._used: list[m.SourceUse] = []

    @property
    def held(self) -> Manifest | None:
        return self._weights.held

    def beside(self) -> Puller:
        """It has the same files and the same base. One waits for the other: a pull of an earlier link may still run."""
        options = {"parallel": self.parallel, "timeout_s": self.timeout_s, "tries": self.tries, "ssl": self.ssl}
        return Puller(key=self.key, base=self._base, **options)

    def close(self) -> None:
        with self._base.lock:
            self._weights.close()
            self._drop_deltas((), most=0)

    def pull(self, load: m.Load, ask: Ask | None = None, *, stop: threading.Event | None = None) -> PulledWeights:
        """Raises PullFailed."""
        with self._base.lock:
            self._ask, self._stop = ask, stop or threading.Event()
            self._routes = {each.file.digest: each.route for each in load.files}
            self._used, self._received_s, before = [], time.monotonic(), self.bytes_received
            try:
                made, apply_s = self._read(load)
                tensors: Mapping[str, Any] = self.tensors()
                if made.base:
                    tensors = MergedWeights(self.base_tensors(), tensors, made.scale)
                received, used = self.bytes_received - before, tuple(self._used)
                return PulledWeights(
                    digest=made.digest, tensors=tensors, base=made.base, bytes=received, used=used, apply_s=apply_s
                )
            finally:
                self._drop_deltas({each.file.digest for each in load.files})

    def reroute(self, routed: m.Routed) -> None:
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

    def _read(self, load: m.Load) -> tuple[Manifest, float]:
        """Returns what is held now, and how long applying deltas took (seconds)."""
        deltas, apply_s = [each.file for each in load.files if each.file.after], 0.0
        if deltas and (self.held is None or self.held.digest != load.digest):
            if deltas[0].before in self._routes:
                self._read_copy(self._weights, deltas[0].before)
            apply_s = self._update(deltas, load.digest)
        made = msgspec.structs.replace(self._read_copy(self._weights, load.digest), version=load.version)
        if made.base:
            self._read_copy(self._base, made.base)
        self._weights.held = made
        return made, apply_s

    def _read_copy(self, copy: LocalCopy, file: str) -> Manifest:
        if copy.held is None or copy.held.digest != file:
            copy.held = self._read_file(file, copy.file, copy.begin).manifest
        return copy.held

    def _update(self, deltas: list[m.FileRef], digest: str) -> float:
        """Bring the buffer to the weights with this digest, as far as deltas do. Returns how long applying them took
        (seconds)."""
        copy = self._weights
        if copy.held is None or copy.held.digest != deltas[0].before:
            return 0.0
        try:
            known = {held.manifest.digest: held for held in self._deltas}
            blobs = [self._read_file(each.digest, known.get(each.digest), self._hold_delta) for each in deltas]
            began_s, wanted = time.monotonic(), decode(blobs[-1].manifest.result, digest)
        except (PullFailed, WindfallError):
            if self._stop.is_set():
                raise
            return 0.0
        # In a chain, a delta may change a chunk and the next one change it back.
        held = copy.begin(wanted, reuse=len(blobs) == 1)
        with ThreadPoolExecutor(self.parallel) as pool:
            with contextlib.suppress(WindfallError):  # then chunks are wrong
                for blob in blobs:
                    delta.apply(held.buffer.view, blob.buffer.view, wanted, pool.map)
            if all(list(pool.map(held.check, held.missing()))):
                copy.held = wanted
                self.delta_used += 1
        return time.monotonic() - began_s

    def _hold_delta(self, manifest: Manifest) -> HeldFile:
        held = HeldFile(manifest, Buffer(manifest.nbytes))
        self._deltas.append(held)
        self.files.add(held)
        return held

    def _read_file(self, file: str, held: HeldFile | None, hold: Callable[[Manifest], HeldFile]) -> HeldFile:
        """Read what is missing of a file. `held`: what this puller has. `hold` gives a file with this manifest a buffer
        if that is another one."""
        with self._sources(file) as sources:
            if held is None or held.manifest.digest != file:
                held = hold(read_manifest(sources))
            Download(sources, held).run(self.parallel)
        return held

    def _drop_deltas(self, newest: Collection[str], most: int = delta.MAX_DELTAS) -> None:
        """Drop the oldest deltas, but none of the newest load, until all have at most a quarter of the copy, and are
        not more than a trainer has."""
        excess = sum(held.manifest.nbytes for held in self._deltas) - self._weights.buffer.nbytes // 4
        for held in [held for held in self._deltas if held.manifest.digest not in newest]:
            if excess > 0 or len(self._deltas) > most:
                excess -= held.manifest.nbytes
                self._deltas.remove(held)
                self.files.remove(held)
                held.buffer.close()

    @contextlib.contextmanager
    def _sources(self, file: str) -> Iterator[FileSources]:
        sources = self._reading[file] = FileSources(
            file,
            NO_ROUTE,
            connect=functools.partial(connect, key=self.key, tls=self.ssl, timeout_s=self.timeout_s),
            ask=self._ask,
            stop=self._stop,
            tries=self.tries,
            on_bytes=self._count,
            received_s=self._received_s,
        )
        sources.reroute(self._routes.get(file, NO_ROUTE))  # not before: `reroute` of this class must find `sources`
        try:
            yield sources
        finally:
            del self._reading[file]
            sources.close()
            self._received_s = sources.received_s
            self.retries += sources.retries
            self._used += sources.uses()

    def _count(self, received: int) -> None:
        self.bytes_received += received


class LocalCopy:
    """A reader's copy of some weights in one buffer, which is used for one version after another."""

    def __init__(self, files: HeldFiles) -> None:
        self.held: Manifest | None = None
        """What the buffer holds, with every chunk verified."""
        self.buffer = Buffer(0)
        self.files = files
        self.lock = threading.Lock()
        """Held by a pull, if this is the base of its adapter."""
        self.file: HeldFile | None = None
        """What the buffer is for, complete or being filled."""

    def close(self) -> None:
        self.held = None
        if self.file is not None:
            self.files.remove(self.file, WITHDRAW_S)
            self.file = None
        self.buffer.close()
        self.buffer = Buffer(0)

    def begin(self, wanted: Manifest, *, reuse: bool = True) -> HeldFile:
        """From now on, the buffer is for these weights. With `reuse`, chunks that have the same bytes at the same place
        are not missing."""
        self.held, old = None, self.file
        if old is not None:
            self.files.remove(old, WITHDRAW_S)
        if self.buffer.nbytes != wanted.nbytes:
            self._resize(wanted.nbytes)
            reuse = False
        known = old.seals() if old is not None and reuse else {}
        file = self.file = HeldFile(wanted, self.buffer)
        for i, chunk in enumerate(pairwise(wanted.bounds())):
            if known.get(chunk) == wanted.seal(i):
                file.add(i)
        self.files.add(file)
        return file

    def tensors(self) -> dict[str, torch.Tensor]:
        """Views of the buffer, by name."""
        if self.held is None:
            raise WindfallError("no complete version is held", where="weights", fix="Pull one first.")
        shared = SharedTensors(self.buffer.handle, self.held.entries)
        return BufferTensors(views(self.buffer.mapped, self.held.entries), shared)

    def _resize(self, nbytes: int) -> None:
        self.buffer.close()
        self.buffer = Buffer(nbytes, used=())
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.buffer.mapped.madvise(mmap.MADV_HUGEPAGE)
