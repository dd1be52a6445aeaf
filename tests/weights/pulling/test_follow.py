"""Readers that follow readers, over real sockets. The one that is followed may fail at every stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.weights.weight_shelves import CHUNK, KEY, ServedShelf, load_of, manifest_of, route_to, some_bytes
from tests.weights.conftest import Proxy
from windfall.link.messages import AskRoute, Holding, ReadRoute, Routed, SourceRef
from windfall.weights.pulling import file_sources, http_source
from windfall.weights.pulling.pull import Puller, PullFailed
from windfall.weights.serve import serve_in_thread

DATA = some_bytes(6 * CHUNK + 99)
CHUNKS = 7


class Reader:
    """A puller whose files others can read."""

    def __init__(self, id: str, **options: Any) -> None:
        self.puller = Puller(**{"key": KEY, "timeout_s": 5.0, "parallel": 2, **options})
        self.asked: list[AskRoute] = []
        self.answer: ReadRoute | None = None
        self.stop = threading.Event()
        self.error: Exception | None = None
        self._closed = False
        self._server = serve_in_thread(self.puller.files, host="127.0.0.1", port=0, key=KEY)
        self.port = self._server.port
        self.ref = SourceRef(id=id, kind="peer", location=f"http://127.0.0.1:{self.port}")

    def pull(self, ref: SourceRef, instead: SourceRef | None = None) -> threading.Thread:
        """Begin to read DATA from a source. `instead`: the answer to each question."""
        made = manifest_of(DATA)
        self.answer = route_to(instead) if instead else self.answer
        thread = threading.Thread(target=self._pull, args=(load_of(0, made.digest, [made], ref),), daemon=True)
        thread.start()
        return thread

    def _pull(self, load: Any) -> None:
        try:
            self.puller.pull(load, self._ask, stop=self.stop)
        except PullFailed as e:
            self.error = e

    def _ask(self, question: AskRoute) -> None:
        self.asked.append(question)
        if self.answer is not None:
            self.puller.reroute(Routed(file=question.file, route=self.answer))

    @property
    def why(self) -> set[tuple[str, str]]:
        return {(use.source, use.why) for question in self.asked for use in question.used if use.why}

    def has_data(self) -> bool:
        return self.puller.held is not None and self.puller.tensors()["all"].numpy().tobytes() == DATA

    def close(self) -> None:
        self.stop.set()
        if not self._closed:
            self._closed = True
            self._server.close()


@pytest.fixture
def trainer() -> Iterator[ServedShelf]:
    shelf = ServedShelf()
    shelf.hold(DATA)
    yield shelf
    shelf.close()


@pytest.fixture
def reader() -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make(id: str, **options: Any) -> Reader:
        readers.append(Reader(id, **options))
        return readers[-1]

    yield make
    for r in readers:
        r.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sources, "ASK_S", 0.3)
    monkeypatch.setattr(http_source, "PEER_SILENT_S", 2.5)  # a server may wait for 2 s


def wait_until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("by_handle", [False, True])
def test_every_chunk_passes_through_a_chain_as_soon_as_it_is_verified(
    reader: Callable[..., Reader], by_handle: bool
) -> None:
    """The first of the chain gets one chunk at a time; the others have it while the first still waits for the next."""
    source, made = ServedShelf(kind="peer", by_handle=by_handle), manifest_of(DATA)
    source.hold(DATA, chunks=0)
    chain = [reader(name, parallel=1) for name in "abc"]
    threads = [chain[0].pull(source.ref), chain[1].pull(chain[0].ref), chain[2].pull(chain[1].ref)]
    bounds = made.bounds()
    for chunk in range(CHUNKS):
        assert all(t.is_alive() for t in threads)
        source.fill(made.digest, chunk)
        expected = Holding(file=made.ref, ranges=((0, bounds[chunk + 1]),) if chunk < CHUNKS - 1 else ())
        wait_until(lambda expected=expected: all(r.puller.files.describe() == (expected,) for r in chain))
    for t in threads:
        t.join(60)
    assert all(r.has_data() and not r.asked for r in chain)
    source.close()


def test_a_follower_may_begin_before_its_source(trainer: ServedShelf, reader: Callable[..., Reader]) -> None:
    a, b = reader("a"), reader("b")
    following = b.pull(a.ref)
    time.sleep(0.2)
    a.pull(trainer.ref).join(60)
    following.join(60)
    assert b.has_data()
    assert not b.asked
    (use,) = b.puller._used
    assert (use.source, use.bytes) == ("a", len(DATA) + len(manifest_of(DATA).encode()))


STAGES = [0, 100, 700, CHUNK // 2, CHUNK + 500, 3 * CHUNK, len(DATA)]
"""Bytes that a source sends before it dies: none, within the header, within the manifest, within chunks."""


@pytest.mark.parametrize("dies_at", STAGES)
def test_a_source_that_is_killed_at_any_stage_is_replaced(
    trainer: ServedShelf, reader: Callable[..., Reader], dies_at: int
) -> None:
    peer = ServedShelf(kind="peer")
    peer.hold(DATA)
    sent, dead = [0], threading.Event()

    def die(number: int, before: int, data: bytes) -> bytes | None:
        if dead.is_set() or sent[0] + len(data) > dies_at:
            dead.set()
            return None
        sent[0] += len(data)
        return data

    proxy = Proxy(peer.port, die)
    b = reader("b", parallel=1)
    b.pull(SourceRef(id="peer", kind="peer", location=proxy.url), trainer.ref).join(60)
    assert b.has_data()
    assert b.why <= {("peer", "unreachable")}
    assert bool(b.why) == dead.is_set()
    assert b.puller.bytes_received == len(DATA) + len(manifest_of(DATA).encode())  # no byte of the file twice
    proxy.close()
    peer.close()


@pytest.mark.parametrize("chunks", range(CHUNKS))
def test_a_reader_that_is_killed_at_any_chunk_stops_none_of_its_followers(
    trainer: ServedShelf, reader: Callable[..., Reader], chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own source gives it only some chunks, then it dies."""
    if not chunks:  # all give up their sources
        monkeypatch.setattr(file_sources, "WAIT_S", 2.0)
    source, made = ServedShelf(kind="peer"), manifest_of(DATA)
    source.hold(DATA, chunks=chunks)
    a, b, c = reader("a"), reader("b"), reader("c")
    b.answer = route_to(trainer.ref)
    threads = [a.pull(source.ref), b.pull(a.ref), c.pull(b.ref)]
    wait_until(lambda: len(b.puller.files.describe()) == 1 and (not chunks or _size(c) == made.bounds()[chunks]))
    a.close()
    for t in threads:
        t.join(60)
    assert b.has_data()
    assert c.has_data()
    assert {source for source, _ in b.why} == {"a"}
    assert not c.asked or not chunks  # without a byte, both wait equally long
    assert isinstance(a.error, PullFailed)
    source.close()


def _size(r: Reader) -> int:
    return sum(stop - start for holding in r.puller.files.describe() for start, stop in holding.ranges)


def test_a_liar_is_found_out_and_its_followers_get_none_of_its_bytes(
    trainer: ServedShelf, reader: Callable[..., Reader]
) -> None:
    liar = ServedShelf(kind="peer")
    held = liar._find(liar.hold(DATA).digest)
    held.buffer.data[3 * CHUNK + 5] ^= 1
    a, b = reader("a"), reader("b")
    threads = [a.pull(liar.ref, trainer.ref), b.pull(a.ref)]
    for t in threads:
        t.join(60)
    assert a.has_data()
    assert b.has_data()
    assert a.why == {(liar.ref.id, "wrong")}
    assert not b.asked
    liar.close()


def test_a_peer_that_stalls_is_replaced_and_reported(trainer: ServedShelf, reader: Callable[..., Reader]) -> None:
    peer, free = ServedShelf(kind="peer"), threading.Event()
    peer.hold(DATA)

    def stall(number: int, sent: int, data: bytes) -> bytes:
        if sent > CHUNK:
            free.wait(60)
        return data

    proxy = Proxy(peer.port, stall)
    b, started = reader("b", parallel=1), time.monotonic()
    b.pull(SourceRef(id="peer", kind="peer", location=proxy.url), trainer.ref).join(60)
    assert b.has_data()
    assert b.why == {("peer", "stalled")}
    assert 2.5 <= time.monotonic() - started < 15
    free.set()
    proxy.close()
    peer.close()


def test_a_copy_that_is_withdrawn_while_it_is_read_is_replaced(
    trainer: ServedShelf, reader: Callable[..., Reader]
) -> None:
    """A worker begins its next version: what its followers still read of the last one is refused."""
    peer, made = ServedShelf(kind="peer"), manifest_of(DATA)
    peer.hold(DATA, chunks=3)
    b = reader("b")
    b.answer = route_to(trainer.ref)
    reading = b.pull(peer.ref)
    wait_until(lambda: _size(b) == 3 * CHUNK)
    peer.withdraw(made.digest)
    reading.join(60)
    assert b.has_data()
    peer.close()


def test_a_load_that_is_stopped_goes_on_where_it_was(trainer: ServedShelf, reader: Callable[..., Reader]) -> None:
    peer = ServedShelf(kind="peer")
    peer.hold(DATA, chunks=4)
    a = reader("a")
    reading = a.pull(peer.ref)
    wait_until(lambda: _size(a) == 4 * CHUNK)
    a.stop.set()
    reading.join(60)
    assert a.puller.held is None
    before, a.stop = a.puller.bytes_received, threading.Event()
    a.pull(trainer.ref).join(60)
    assert a.has_data()
    assert a.puller.bytes_received - before == len(DATA) - 4 * CHUNK
    peer.close()
