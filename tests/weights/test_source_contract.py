"""The contract of a Source, which every kind of source must pass.

A *shelf* holds files, and connects sources to them. To test another kind of source, add its shelf to SHELVES.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import pytest

from windfall.link.messages import SourceRef
from windfall.weights import bucket as buckets
from windfall.weights.buffers import Buffer
from windfall.weights.held_files import HeldFile
from windfall.weights.manifest import chunk_bounds, hash_chunk, make
from windfall.weights.source import Source, SourceBroken, SourceGone, SourceWaits, connect

CHUNK = 1 << 16
UNKNOWN = "0" * 64


class Shelf(Protocol):
    absent: type[SourceBroken]
    """What its sources raise for a file that is not here."""

    def hold(self, data: bytes, *, chunks: int) -> str:
        """Hold a file with these bytes, cut into chunks of CHUNK, of which only the first `chunks` are here. Returns
        its digest."""
        ...

    def fill(self, file: str, chunk: int) -> None:
        """Now this chunk is here, too."""
        ...

    def withdraw(self, file: str) -> None: ...

    def manifest(self, file: str) -> bytes: ...

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source: ...

    def close(self) -> None: ...


class MemorySource:
    """A source in memory, which other tests use, too."""

    def __init__(self, shelf: MemoryShelf, ref: SourceRef, stopped: Callable[[], bool]) -> None:
        self.shelf = shelf
        self.ref = ref
        self.trusted = ref.kind == "trainer"
        self._stopped = stopped
        self._promised = memoryview(b"")

    def manifest(self, file: str) -> bytes:
        return self.shelf.find(file)[0]

    def open(self, file: str, start: int, stop: int) -> int:
        assert not self._promised, "the bytes promised before were not read"
        _, data, filled = self.shelf.find(file)
        end = start
        while end < stop and end // CHUNK in filled:
            end = min(stop, (end // CHUNK + 1) * CHUNK)
        if end == start:
            time.sleep(0.01)
            raise SourceWaits(f"nothing from byte {start} on yet")
        self._promised = memoryview(data)[start:end]
        return end - start

    def read_into(self, view: memoryview) -> int:
        if self._stopped():
            raise SourceBroken("stopped")
        n = min(len(view), len(self._promised))
        view[:n], self._promised = self._promised[:n], self._promised[n:]
        return n

    def close(self) -> None:
        self._promised = memoryview(b"")


class MemoryShelf:
    absent = SourceGone

    def __init__(self, **_: Any) -> None:
        self.files: dict[str, tuple[bytes, bytes, set[int]]] = {}
        self.withdrawn: set[str] = set()

    def hold(self, data: bytes, *, chunks: int) -> str:
        file = f"{len(self.files) + 1:064x}"
        self.files[file] = b"manifest of " + file.encode(), data, set(range(chunks))
        return file

    def fill(self, file: str, chunk: int) -> None:
        self.files[file][2].add(chunk)

    def withdraw(self, file: str) -> None:
        self.withdrawn.add(file)

    def manifest(self, file: str) -> bytes:
        return self.files[file][0]

    def find(self, file: str) -> tuple[bytes, bytes, set[int]]:
        if file not in self.files or file in self.withdrawn:
            raise SourceGone(f"{file} is not here")
        return self.files[file]

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source:
        return MemorySource(self, SourceRef(id="memory", kind="trainer", location="memory"), stopped)

    def close(self) -> None: ...


class BucketShelf:
    """A folder; a part is a chunk."""

    absent = SourceWaits  # not there yet

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(buckets, "PART_BYTES", CHUNK)
        self._store = buckets.BucketStore(f"file://{self._folder.name}", "run")
        self._files: dict[str, HeldFile] = {}

    def hold(self, data: bytes, *, chunks: int) -> str:
        buffer = Buffer(len(data))
        buffer.data[:] = np.frombuffer(data, np.uint8)
        hashes = [hash_chunk(buffer.data[a:b]) for a, b in pairwise(chunk_bounds(len(data), CHUNK))]
        sums, seals = (b"".join(part) for part in zip(*hashes, strict=True))
        made = make(nbytes=len(data), chunk_bytes=CHUNK, chunks=sums, seals=seals, before=UNKNOWN, after=UNKNOWN)
        self._files[made.digest] = HeldFile(made, buffer, ranges=((0, chunks * CHUNK),), filled=True)
        self._store.upload(self._files[made.digest])
        return made.digest

    def fill(self, file: str, chunk: int) -> None:
        held = self._files[file]
        part = ((chunk * CHUNK, (chunk + 1) * CHUNK),)
        self._store.upload(HeldFile(held.manifest, held.buffer, ranges=part, filled=True))

    def withdraw(self, file: str) -> None:
        self._store.expire(self._files.keys() - {file})

    def manifest(self, file: str) -> bytes:
        return self._files[file].manifest.encode()

    def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source:
        ref = SourceRef(id="bucket", kind="bucket", location=self._store.location)
        return connect(ref, key="", tls=None, timeout_s=5.0, stopped=stopped)

    def close(self) -> None:
        self._patch.undo()
        self._folder.cleanup()


SHELVES: dict[str, Callable[[], Shelf]] = {"memory": MemoryShelf, "bucket": BucketShelf}


@pytest.fixture(params=SHELVES)
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    made = SHELVES[request.param]()
    yield made
    made.close()


def some_bytes(n: int) -> bytes:
    return np.random.default_rng(n).bytes(n)


def read(source: Source, file: str, start: int, stop: int) -> bytes:
    """These bytes, however many answers they take. Raises what the source raises."""
    out = bytearray(stop - start)
    at = start
    while at < stop:
        promised = source.open(file, at, stop)
        assert 1 <= promised <= stop - at
        end = at + promised
        while at < end:
            n = source.read_into(memoryview(out)[at - start : min(end, at + 30_000) - start])
            assert 1 <= n <= end - at
            at += n
    return bytes(out)


def test_sends_exactly_the_requested_bytes(shelf: Shelf) -> None:
    data = some_bytes(5 * CHUNK + 123)
    file = shelf.hold(data, chunks=6)
    with closing(shelf.connect()) as source:
        for start, stop in ((0, len(data)), (0, 1), (CHUNK - 1, CHUNK + 1), (7, 3 * CHUNK), (len(data) - 1, len(data))):
            assert read(source, file, start, stop) == data[start:stop]


def test_sends_several_files_over_one_connection(shelf: Shelf) -> None:
    files = {shelf.hold(data, chunks=1): data for data in (some_bytes(n) for n in (1, 100, CHUNK))}
    with closing(shelf.connect()) as source:
        for _ in range(2):
            for file, data in files.items():
                assert source.manifest(file) == shelf.manifest(file)
                assert read(source, file, 0, len(data)) == data


def test_sends_only_what_is_here_and_goes_on_when_more_is(shelf: Shelf) -> None:
    data = some_bytes(3 * CHUNK)
    file = shelf.hold(data, chunks=1)
    with closing(shelf.connect()) as source:
        assert source.manifest(file) == shelf.manifest(file)
        assert source.open(file, 100, len(data)) == CHUNK - 100
        got = bytearray(CHUNK - 100)
        at = 0
        while at < len(got):
            at += source.read_into(memoryview(got)[at:])
        assert got == data[100:CHUNK]
        with pytest.raises(SourceWaits):
            source.open(file, CHUNK, len(data))
        shelf.fill(file, 1)
        shelf.fill(file, 2)
        assert read(source, file, CHUNK, len(data)) == data[CHUNK:]


def test_a_missing_or_withdrawn_file_is_gone(shelf: Shelf) -> None:
    data = some_bytes(CHUNK)
    file = shelf.hold(data, chunks=1)
    with closing(shelf.connect()) as source:
        assert read(source, file, 0, CHUNK) == data
        with pytest.raises(shelf.absent):
            source.open(UNKNOWN, 0, 10)
        shelf.withdraw(file)
        with pytest.raises(shelf.absent):
            read(source, file, 0, CHUNK)


def test_stops_soon(shelf: Shelf) -> None:
    file = shelf.hold(some_bytes(2 * CHUNK), chunks=1)
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    deadline = time.monotonic() + 10

    def read_forever(source: Source) -> None:
        while time.monotonic() < deadline:
            with suppress(SourceWaits):
                read(source, file, 0, CHUNK)

    with closing(shelf.connect(stop.is_set)) as source, pytest.raises(SourceBroken):
        read_forever(source)


def test_close_can_be_called_again_and_after_half_an_answer(shelf: Shelf) -> None:
    file = shelf.hold(some_bytes(CHUNK), chunks=1)
    source = shelf.connect()
    source.open(file, 0, CHUNK)
    source.read_into(memoryview(bytearray(10)))
    source.close()
    source.close()
