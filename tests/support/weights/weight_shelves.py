"""Files of weights for tests of readers: shelves that hold them, sources of them, and routes to these."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest

from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import WeightHolder
from windfall.controller.directory.traffic import TrafficPrices
from windfall.link.messages import (
    FileRef,
    FileRoute,
    HolderFiles,
    Holding,
    Load,
    PublishedFiles,
    ReadRoute,
    RoutePart,
    SourceRef,
)
from windfall.weights import bucket as buckets
from windfall.weights.buffers import Buffer, machine
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.manifest import Manifest, TensorEntry, chunk_bounds, hash_chunk, make
from windfall.weights.pulling.source import Source, SourceBroken, SourceGone, SourceWaits, connect
from windfall.weights.serve import serve_in_thread

CHUNK = 1 << 16
KEY = "a-key-for-tests"


def some_bytes(n: int) -> bytes:
    return np.random.default_rng(n).bytes(n)


def manifest_of(data: bytes, **fields: Any) -> Manifest:
    """The manifest of a full copy with one tensor."""
    bounds = chunk_bounds(len(data), CHUNK, fields.get("cuts", ()))
    hashes = [hash_chunk(data[start:stop]) for start, stop in pairwise(bounds)]
    entry = TensorEntry(name="all", dtype="uint8", shape=(len(data),), offset=0, nbytes=len(data))
    made = {"chunks": b"".join(c for c, _ in hashes), "seals": b"".join(s for _, s in hashes), "entries": (entry,)}
    return make(nbytes=len(data), chunk_bytes=CHUNK, **{**made, **fields})


class Shelf(Protocol):
    """Holds files, and connects sources to them."""

    absent: type[SourceBroken]
    """What its sources raise for a file that is not here."""

    def hold(self, data: bytes, *, chunks: int) -> Manifest:
        """Hold a file with these bytes, cut into chunks of CHUNK, of which only the first `chunks` are here."""
        ...

    def fill(self, file: str, chunk: int) -> None:
        """Now this chunk is here, too."""
        ...

    def withdraw(self, file: str) -> None: ...

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source: ...

    def close(self) -> None: ...


class MemoryShelf:
    """A shelf in memory, whose sources can fail."""

    absent = SourceGone

    def __init__(self, id: str = "memory", kind: Any = "trainer") -> None:
        self.ref = SourceRef(id=id, kind=kind, location=f"memory://{id}")
        self.files: dict[str, tuple[Manifest, bytearray, set[int]]] = {}
        self.withdrawn: set[str] = set()
        self.opened: list[tuple[int, int]] = []
        """The ranges that were asked for."""
        self.read_bytes = 0
        self.fault: Callable[[str, int], None] = lambda stage, at: None
        """Called with "connect", "manifest", "open" or "read", and the position; it may raise SourceBroken."""

    def hold(self, data: bytes, *, chunks: int = 1 << 20) -> Manifest:
        made = manifest_of(data)
        self.files[made.digest] = made, bytearray(data), set(range(chunks))
        return made

    def fill(self, file: str, chunk: int) -> None:
        self.files[file][2].add(chunk)

    def withdraw(self, file: str) -> None:
        self.withdrawn.add(file)

    def find(self, file: str) -> tuple[Manifest, bytearray, set[int]]:
        if file not in self.files or file in self.withdrawn:
            raise SourceGone(f"{self.ref.id}: {file} is not here")
        return self.files[file]

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source:
        self.fault("connect", 0)
        return MemorySource(self, stopped)

    def close(self) -> None: ...


class MemorySource:
    def __init__(self, shelf: MemoryShelf, stopped: Callable[[], bool]) -> None:
        self.shelf = shelf
        self.ref = shelf.ref
        self.trusted = shelf.ref.kind == "trainer"
        self._stopped = stopped
        self._at = 0
        self._promised = memoryview(b"")

    def manifest(self, file: str) -> bytes:
        self.shelf.fault("manifest", 0)
        return self.shelf.find(file)[0].encode()

    def open(self, file: str, start: int, stop: int) -> int:
        assert not self._promised, "the bytes promised before were not read"
        self.shelf.fault("open", start)
        _, data, filled = self.shelf.find(file)
        end = start
        while end < stop and end // CHUNK in filled:
            end = min(stop, (end // CHUNK + 1) * CHUNK)
        if end == start:
            time.sleep(0.01)
            raise SourceWaits(f"{self.ref.id}: nothing from byte {start} on yet")
        self.shelf.opened.append((start, stop))
        self._at, self._promised = start, memoryview(data)[start:end]
        return end - start

    def read_into(self, view: memoryview) -> int:
        if self._stopped():
            raise SourceBroken("stopped")
        self.shelf.fault("read", self._at)
        n = min(len(view), len(self._promised), 10_000)
        view[:n], self._promised = self._promised[:n], self._promised[n:]
        self._at += n
        self.shelf.read_bytes += n
        return n

    def close(self) -> None:
        self._promised = memoryview(b"")


class BucketShelf:
    """A bucket in a folder, whose objects are chunks."""

    absent = SourceWaits  # not there yet

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(buckets, "PART_BYTES", CHUNK)
        self._store = buckets.BucketStore(f"file://{self._folder.name}", "run")
        self._files: dict[str, HeldFile] = {}

    def hold(self, data: bytes, *, chunks: int) -> Manifest:
        made, buffer = manifest_of(data), Buffer(len(data))
        buffer.data[:] = np.frombuffer(data, np.uint8)
        self._files[made.digest] = HeldFile(made, buffer, ranges=((0, chunks * CHUNK),), filled=True)
        self._store.upload(self._files[made.digest])
        return made

    def fill(self, file: str, chunk: int) -> None:
        held = self._files[file]
        part = ((chunk * CHUNK, (chunk + 1) * CHUNK),)
        self._store.upload(HeldFile(held.manifest, held.buffer, ranges=part, filled=True))

    def withdraw(self, file: str) -> None:
        self._store.expire(self._files.keys() - {file})

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source:
        ref = SourceRef(id="bucket", kind="bucket", location=self._store.location)
        return connect(ref, key="", tls=None, timeout_s=5.0, stopped=stopped)

    def close(self) -> None:
        self._patch.undo()
        self._folder.cleanup()


class ServedShelf:
    """Files that a weight server serves. With `by_handle`, its sources read the memory of the server."""

    absent = SourceGone

    def __init__(self, *, by_handle: bool = False, kind: Any = "trainer") -> None:
        self.files = HeldFiles()
        self._server = serve_in_thread(self.files, host="127.0.0.1", port=0, key=KEY)
        self.port = self._server.port
        self.ref = SourceRef(
            id=f"served-{self.port}",
            kind=kind,
            location=f"http://127.0.0.1:{self.port}",
            machine=machine() if by_handle else "",
        )

    def hold(self, data: bytes, *, chunks: int = 1 << 20) -> Manifest:
        made, buffer = manifest_of(data), Buffer(len(data))
        buffer.data[:] = np.frombuffer(data, np.uint8)
        held = HeldFile(made, buffer)
        for i in range(min(chunks, len(made.chunks) // 8)):
            held.add(i)
        self.files.add(held)
        return made

    def fill(self, file: str, chunk: int) -> None:
        self._find(file).add(chunk)

    def withdraw(self, file: str) -> None:
        self.files.remove(self._find(file))

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source:
        return connect(self.ref, key=KEY, tls=None, timeout_s=5.0, stopped=stopped)

    def close(self) -> None:
        self._server.close()

    def _find(self, file: str) -> HeldFile:
        held = self.files.find(file)
        assert held is not None
        return held


def route_to(ref: SourceRef) -> ReadRoute:
    """All bytes from this source."""
    return ReadRoute(sources=(ref,), parts=(RoutePart(start=0, stop=1 << 40, source=0),))


def load_of(version: int, digest: str, files: Iterable[FileRef | Manifest], ref: SourceRef) -> Load:
    """Read these files from this source."""
    named = [file.ref if isinstance(file, Manifest) else file for file in files]
    routes = tuple(FileRoute(file=file, route=route_to(ref)) for file in named)
    return Load(version=version, digest=digest, files=routes)


def load_for(made: Manifest, held: str, holders: Mapping[str, Sequence[Holding]]) -> Load:
    """What the controller would tell a reader with the weights `held`. `holders`: by location."""
    directory = Directory(TrafficPrices())
    files = {holding.file.digest: holding.file for holds in holders.values() for holding in holds}
    served = tuple(HolderFiles(location=location, holds=tuple(holds)) for location, holds in holders.items())
    holds = (Holding(file=FileRef(digest=held, nbytes=0)),) if held else ()
    directory.join(WeightHolder(id="reader", kind="peer"), holds)
    directory.publish(
        PublishedFiles(version=made.version, digest=made.digest, files=tuple(files.values()), holders=served), 0.0
    )
    return Load(version=made.version, digest=made.digest, files=directory.load("reader", made.digest))
