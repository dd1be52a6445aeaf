"""The contract of a Source, which every kind of source must pass.

To test another kind of source, add its shelf (tests/support/weights/weight_shelves.py) to SHELVES.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest

from tests.support.weights.weight_shelves import CHUNK, BucketShelf, MemoryShelf, ServedShelf, Shelf, some_bytes
from windfall.weights.pulling.source import Source, SourceBroken, SourceWaits

UNKNOWN = "0" * 64
SHELVES: dict[str, Callable[[], Shelf]] = {
    "memory": MemoryShelf,
    "http": ServedShelf,
    "machine": lambda: ServedShelf(by_handle=True),
    "bucket": BucketShelf,
}


@pytest.fixture(params=SHELVES)
def shelf(request: pytest.FixtureRequest) -> Iterator[Shelf]:
    made = SHELVES[request.param]()
    yield made
    made.close()


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
    file = shelf.hold(data, chunks=6).digest
    with closing(shelf.connect()) as source:
        for start, stop in ((0, len(data)), (0, 1), (CHUNK - 1, CHUNK + 1), (7, 3 * CHUNK), (len(data) - 1, len(data))):
            assert read(source, file, start, stop) == data[start:stop]


def test_sends_several_files_over_one_connection(shelf: Shelf) -> None:
    files = [(shelf.hold(data, chunks=1), data) for data in (some_bytes(n) for n in (1, 100, CHUNK))]
    with closing(shelf.connect()) as source:
        for _ in range(2):
            for made, data in files:
                assert source.manifest(made.digest) == made.encode()
                assert read(source, made.digest, 0, len(data)) == data


def test_sends_only_what_is_here_and_goes_on_when_more_is(shelf: Shelf) -> None:
    data = some_bytes(3 * CHUNK)
    file = shelf.hold(data, chunks=1).digest
    with closing(shelf.connect()) as source:
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
    file = shelf.hold(data, chunks=1).digest
    with closing(shelf.connect()) as source:
        assert read(source, file, 0, CHUNK) == data
        with pytest.raises(shelf.absent):
            source.open(UNKNOWN, 0, 10)
        shelf.withdraw(file)
        with pytest.raises(shelf.absent):
            read(source, file, 0, CHUNK)


def test_stops_soon(shelf: Shelf) -> None:
    file = shelf.hold(some_bytes(2 * CHUNK), chunks=1).digest
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
    file = shelf.hold(some_bytes(CHUNK), chunks=1).digest
    source = shelf.connect()
    source.open(file, 0, CHUNK)
    source.read_into(memoryview(bytearray(10)))
    source.close()
    source.close()
