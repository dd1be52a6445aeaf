"""Reads of one file from several sources, in memory: takeover at the byte, wrong bytes, stalls, and other routes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.weights.weight_shelves import CHUNK, MemoryShelf, manifest_of, route_to, some_bytes
from windfall.link.messages import AskRoute, ReadRoute, RoutePart, SourceRef
from windfall.weights.buffers import Buffer
from windfall.weights.held_files import HeldFile
from windfall.weights.pulling import download, file_sources
from windfall.weights.pulling import source as sources_module
from windfall.weights.pulling.download import Download, read_manifest
from windfall.weights.pulling.file_sources import FileSources, PullFailed
from windfall.weights.pulling.source import Source, SourceBroken, SourceGone, SourceStalled, SourceWrong

DATA = some_bytes(5 * CHUNK + 777)
STAGES = ["connect", "manifest", "open", "read"]


class Read:
    """One read of DATA. `answer` gets each question of the reader, and may return a route; by default, one to the first
    shelf that was not reported."""

    def __init__(
        self,
        *shelves: MemoryShelf,
        route: ReadRoute | None = None,
        answer: Callable[[AskRoute], ReadRoute | None] | None = None,
        parallel: int = 1,
        tries: int = 3,
        manifest: Any = None,
    ) -> None:
        self.shelves = {shelf.ref.id: shelf for shelf in shelves}
        self.made = manifest or manifest_of(DATA)
        self.asked: list[AskRoute] = []
        self.stop = threading.Event()
        self.held = HeldFile(self.made, Buffer(len(DATA)))
        self.received = 0
        self._answer = answer or self._next_shelf
        self._parallel = parallel
        self.sources = FileSources(
            self.made.digest,
            route_to(shelves[0].ref) if route is None else route,
            connect=self._connect,
            ask=self._ask,
            stop=self.stop,
            tries=tries,
            on_bytes=self._count,
        )

    def run(self) -> Read:
        assert read_manifest(self.sources) == self.made
        Download(self.sources, self.held).run(self._parallel)
        assert bytes(self.held.buffer.view) == DATA
        assert not self.held.missing()
        return self

    @property
    def done(self) -> list[int]:
        return sorted(set(range(len(self.made.chunks) // 8)) - set(self.held.missing()))

    def why(self) -> list[tuple[str, str]]:
        return [(use.source, use.why) for ask in self.asked for use in ask.used if use.why]

    def _connect(self, ref: SourceRef, stopped: Callable[[], bool]) -> Source:
        return self.shelves[ref.id].connect(stopped)

    def _next_shelf(self, question: AskRoute) -> ReadRoute | None:
        reported = {id for id, _ in self.why()}
        return next((route_to(shelf.ref) for id, shelf in self.shelves.items() if id not in reported), None)

    def _ask(self, question: AskRoute) -> None:
        self.asked.append(question)
        route = self._answer(question)
        if route is not None:
            threading.Thread(target=self.sources.reroute, args=(route,)).start()

    def _count(self, n: int) -> None:
        self.received += n


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sources, "ASK_S", 0.2)
    monkeypatch.setattr(file_sources, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(file_sources, "WAIT_S", 0.4)
    monkeypatch.setattr(file_sources, "NO_SOURCE_S", 0.6)
    monkeypatch.setattr(file_sources, "FIRST_DELAY_S", 0.01)


def shelf(id: str, kind: Any = "trainer", *, chunks: int = 100) -> MemoryShelf:
    made = MemoryShelf(id, kind)
    made.hold(DATA, chunks=chunks)
    return made


def broken_from(stage: str, at: int = 0, error: type[SourceBroken] = SourceBroken) -> Callable[[str, int], None]:
    def fault(now: str, position: int) -> None:
        if now == stage and position >= at:
            raise error(f"broken at {now}")

    return fault


@pytest.mark.parametrize("parallel", [1, 3])
def test_reads_from_one_source(parallel: int) -> None:
    read = Read(shelf("a"), parallel=parallel).run()
    assert read.received == len(DATA) + len(read.made.encode())
    (use,) = read.sources.uses()
    assert (use.source, use.bytes, use.why) == ("a", read.received, "")
    assert read.sources.uses() == ()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("at", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5_000, 5 * CHUNK])
def test_another_source_goes_on_at_the_byte(stage: str, at: int) -> None:
    a, b = shelf("a"), shelf("b")
    a.fault = broken_from(stage, at)
    Read(a, b).run()
    if stage == "read" and at:
        assert b.opened[0][0] == a.read_bytes >= at
    assert a.read_bytes + b.read_bytes == len(DATA)  # no byte twice


def test_a_break_is_retried_at_the_same_source_before_another_one() -> None:
    a, b = shelf("a"), shelf("b")
    broken: list[int] = []

    def once(stage: str, at: int) -> None:
        if stage == "read" and at > CHUNK and not broken:
            broken.append(at)
            raise SourceBroken("reset")

    a.fault = once
    read = Read(a, b).run()
    assert broken
    assert not b.opened
    assert not read.asked


@pytest.mark.parametrize("error", [SourceStalled, SourceGone])
def test_a_stalled_or_gone_source_is_reported_and_replaced_by_the_answer(error: type[SourceBroken]) -> None:
    a, b, c = shelf("a", "peer"), shelf("b"), shelf("c")
    a.fault = broken_from("read", 2 * CHUNK + 5_000, error)
    read = Read(a, b, c, answer=lambda question: route_to(c.ref)).run()
    assert read.why() == [("a", error.why)]
    assert not b.opened
    assert c.opened[0][0] == a.read_bytes
    (question,) = read.asked
    assert (question.file, question.received) == (read.made.digest, 2 * CHUNK)
    assert sum(use.bytes for use in (*question.used, *read.sources.uses())) == read.received


def test_without_an_answer_the_reader_tries_the_same_source_again() -> None:
    a, stalled = shelf("a", "peer"), [1, 2]

    def fault(stage: str, at: int) -> None:
        if stage == "open" and stalled:
            stalled.pop()
            raise SourceStalled("once more")

    a.fault = fault
    began = time.monotonic()
    read = Read(a, answer=lambda question: None).run()
    assert read.why() == [("a", "stalled")] * 2
    assert 2 * 0.2 <= time.monotonic() - began < 30


def test_a_break_of_all_connections_counts_once() -> None:
    a = shelf("a")
    left = [6]

    def break_some(stage: str, at: int) -> None:
        if stage == "open" and left[0]:
            left[0] -= 1
            time.sleep(0.02)
            raise SourceBroken("restarting")

    a.fault = break_some
    read = Read(a, parallel=6, tries=2, answer=lambda question: None).run()
    assert len(read.asked) <= 1


@pytest.mark.parametrize("kind", ["trainer", "peer"])
def test_wrong_bytes_are_requested_once_more_then_the_source_is_dropped(kind: Any) -> None:
    a, b = shelf("a", kind), shelf("b")
    a.files[manifest_of(DATA).digest][1][CHUNK + 7] ^= 1
    read = Read(a, b).run()
    assert read.why() == [("a", "wrong")]
    assert [start for start, _ in a.opened] == [0, CHUNK, CHUNK]
    assert b.opened[0][0] == CHUNK  # not a byte of the chunk is believed
    assert read.received == len(DATA) + len(read.made.encode()) + 2 * CHUNK


def test_wrong_bytes_of_the_only_source_fail_the_read() -> None:
    a = shelf("a")
    a.files[manifest_of(DATA).digest][1][5] ^= 1
    read = Read(a)
    with pytest.raises(PullFailed, match=r"memory://a sent chunk 0 of .* damaged twice"):
        read.run()
    assert 0 not in read.done


def test_a_chunk_of_two_sources_convicts_neither() -> None:
    """The first half of a chunk comes from a liar that then breaks."""
    a, b = shelf("a", "peer"), shelf("b", "peer")
    a.files[manifest_of(DATA).digest][1][CHUNK + 7] ^= 1
    a.fault = broken_from("read", CHUNK + 20_000)
    read = Read(a, b).run()
    assert set(read.why()) == {("a", "unreachable")}
    assert [start for start, _ in b.opened][:2] == [CHUNK + 20_000, CHUNK]


def slow_in_chunk_1(monkeypatch: pytest.MonkeyPatch, shelf: MemoryShelf) -> None:
    """The first connection that reads chunk 1 needs 5 s for it. Others take over parts."""
    monkeypatch.setattr(download, "SLOW_READ_BYTES", CHUNK // 16)
    monkeypatch.setattr(download, "SLOW_READ_S", 0.0)
    slow: list[int] = []

    def fault(stage: str, at: int) -> None:
        if stage == "read" and at // CHUNK == 1:
            slow.append(threading.get_ident())
            time.sleep(1.0 if slow[0] == slow[-1] else 0.0)

    shelf.fault = fault


def test_the_rest_of_a_slow_connection_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    a = shelf("a")
    slow_in_chunk_1(monkeypatch, a)
    began_s = time.monotonic()
    Read(a, parallel=3).run()
    assert time.monotonic() - began_s < 12
    assert a.read_bytes == len(DATA)  # no byte twice
    assert [1 for start, _ in a.opened if CHUNK < start < 2 * CHUNK]


def test_a_wrong_chunk_that_was_read_in_parts_is_read_again_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = shelf("a", "peer"), shelf("b", "peer")
    monkeypatch.setattr(file_sources, "ASK_S", 60.0)
    slow_in_chunk_1(monkeypatch, a)
    a.files[manifest_of(DATA).digest][1][CHUNK + 7] ^= 1
    read = Read(a, b, parallel=3).run()
    assert ("a", "wrong") in read.why()
    assert min(b.opened)[0] == CHUNK
    assert b.read_bytes == CHUNK  # not a byte of the chunk is believed


def test_a_connection_waits_for_the_source_that_another_one_has_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sources, "ASK_S", 60.0)
    a, b = shelf("a", "peer"), shelf("b", "peer")
    asked = threading.Event()
    read = Read(a, b, answer=lambda question: asked.set())

    def wrong(source: Source) -> None:
        raise SourceWrong("damaged")

    first = threading.Thread(target=read.sources.attempt, args=(CHUNK, None, wrong))
    first.start()
    assert asked.wait(60)
    threading.Timer(0.1, read.sources.reroute, [route_to(b.ref)]).start()
    used = list[str]()
    read.sources.attempt(CHUNK, None, lambda source: used.append(source.ref.id))
    first.join(60)
    assert used == ["b"]


def test_a_chunk_of_two_sources_is_trusted_only_if_both_are() -> None:
    unsealed = manifest_of(DATA, seals=bytes(32 * 6))
    a, b = MemoryShelf("a", "trainer"), MemoryShelf("b", "peer")
    for each in (a, b):
        each.files[unsealed.digest] = unsealed, bytearray(DATA), set(range(6))
    a.fault = broken_from("read", CHUNK + 20_000)
    with pytest.raises(PullFailed, match=r"memory://b sent chunk 1 of .* damaged"):
        Read(a, b, manifest=unsealed).run()


def test_a_wrong_manifest_drops_the_source() -> None:
    a, b = shelf("a", "peer"), shelf("b")
    digest = manifest_of(DATA).digest
    a.files[digest] = (manifest_of(some_bytes(100)), *a.files[digest][1:])
    assert Read(a, b).run().why() == [("a", "wrong")]


def test_checksums_suffice_for_a_trusted_source_only() -> None:
    """The seals in this manifest are wrong; a forger would make the checksums fit."""
    unsealed = manifest_of(DATA, seals=bytes(32 * 6))
    for kind in ("trainer", "peer"):
        a = MemoryShelf("a", kind)
        a.files[unsealed.digest] = unsealed, bytearray(DATA), set(range(6))
        if kind == "trainer":
            Read(a, manifest=unsealed).run()
        else:
            with pytest.raises(PullFailed, match="damaged twice"):
                Read(a, manifest=unsealed).run()


def test_a_source_is_trusted_only_if_all_of_its_bytes_of_a_chunk_are() -> None:
    unsealed, trust = manifest_of(DATA, seals=bytes(32 * 6)), iter([True, False])

    class Changing(MemoryShelf):
        def connect(self, stopped: Callable[[], bool] = lambda: False) -> Source:
            source = super().connect(stopped)
            source.trusted = next(trust, True)
            return source

    a = Changing("a", "peer")
    a.files[unsealed.digest] = unsealed, bytearray(DATA), set(range(6))
    a.fault = lambda stage, at: broken_from("read", 20_000)(stage, at) if len(a.opened) == 1 else None
    Read(a, manifest=unsealed).run()
    assert [start for start, _ in a.opened][:3] == [0, 20_000, 0]  # the mixed chunk has no seal, so it is read again


def test_follows_a_source_that_is_being_filled() -> None:
    a = shelf("a", "peer", chunks=0)
    read = Read(a)
    reading = threading.Thread(target=read.run)
    reading.start()
    for chunk in range(6):
        until_s = time.monotonic() + 60
        while len(read.done) < chunk and time.monotonic() < until_s:
            time.sleep(0.005)
        assert read.done == list(range(chunk))
        a.fill(read.made.digest, chunk)
    reading.join(60)
    assert sorted(read.done) == list(range(6))
    assert not read.asked


def test_a_source_that_gets_no_further_is_stalled() -> None:
    a, b = shelf("a", "peer", chunks=2), shelf("b")
    read = Read(a, b).run()
    assert read.why() == [("a", "stalled")]
    assert a.read_bytes == 2 * CHUNK


def test_a_source_that_trickles_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends one piece after the other, but too slowly."""
    monkeypatch.setattr(sources_module, "PACE_S", 0.1)
    a, b = shelf("a", "peer"), shelf("b")
    a.fault = lambda stage, at: time.sleep(0.03) if stage == "read" else None
    read = Read(a, b).run()
    assert ("a", "stalled") in read.why()
    assert a.read_bytes < 2 * CHUNK


def test_a_byte_per_connection_is_no_progress() -> None:
    a, b = shelf("a", "peer"), shelf("b")
    a.fault = lambda stage, at: broken_from("read")(stage, at) if a.opened and at > a.opened[-1][0] else None
    read = Read(a, b).run()
    assert len(a.opened) <= 3
    assert ("a", "unreachable") in read.why()


def test_another_route_ends_the_wait_for_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sources, "WAIT_S", 60.0)
    a, b = shelf("a", "peer", chunks=1), shelf("b")
    read = Read(a, b, route=route_to(a.ref))
    threading.Timer(0.2, read.sources.reroute, args=(route_to(b.ref),)).start()
    read.run()
    assert b.opened[0][0] == CHUNK


def test_all_sources_fail_with_a_line_for_each() -> None:
    a, b = shelf("a"), shelf("b")
    a.fault = broken_from("connect")
    b.fault = broken_from("open", 0, SourceGone)
    read = Read(a, b)
    with pytest.raises(PullFailed, match=r"broken at connect.*; broken at open"):
        read.run()
    assert {("a", "unreachable"), ("b", "gone")} == set(read.why())


def test_without_a_route_the_reader_asks_until_there_is_one() -> None:
    a = shelf("a")
    answers = iter([None, ReadRoute(sources=(), parts=()), route_to(a.ref)])
    read = Read(a, route=ReadRoute(sources=(), parts=()), answer=lambda question: next(answers)).run()
    assert len(read.asked) == 3
    with pytest.raises(PullFailed, match=r"no source of .* is known"):
        Read(a, route=ReadRoute(sources=(), parts=()), answer=lambda question: None).run()


@pytest.mark.parametrize("kind", ["unknown", "broken", "waiting"])
def test_a_read_without_a_byte_fails_in_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sources, "NO_BYTE_S", 0.3)
    monkeypatch.setattr(file_sources, "NO_SOURCE_S", 60.0)
    monkeypatch.setattr(file_sources, "WAIT_S", 60.0)
    a = shelf("a", "peer", chunks=0 if kind == "waiting" else 6)
    if kind == "broken":
        a.fault = broken_from("connect")
    route = ReadRoute(sources=(), parts=()) if kind == "unknown" else None
    began_s = time.monotonic()
    with pytest.raises(PullFailed, match="no byte for"):
        Read(a, route=route, answer=lambda question: None, tries=100).run()
    assert time.monotonic() - began_s < 30


def test_each_part_comes_from_its_own_source() -> None:
    a, b = shelf("a"), shelf("b")
    cuts = (0, 2 * CHUNK, 3 * CHUNK, len(DATA))
    parts = tuple(RoutePart(start=cuts[i], stop=cuts[i + 1], source=i % 2) for i in range(3))
    read = Read(a, b, route=ReadRoute(sources=(a.ref, b.ref), parts=parts), parallel=2).run()
    assert (a.read_bytes, b.read_bytes) == (len(DATA) - CHUNK, CHUNK)
    assert {use.source for use in read.sources.uses()} == {"a", "b"}


def test_a_read_that_has_become_slow_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "SLOW_S", 2)
    a = shelf("a", "peer")
    a.fault = lambda stage, at: time.sleep(0.6 if stage == "read" and at > 4 * CHUNK else 0)
    read = Read(a).run()
    assert ("a", "slow") in read.why()


@pytest.mark.parametrize("kind", ["waiting", "reading", "asking"])
def test_stop_ends_every_wait(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sources, "ASK_S", 0.2)
    monkeypatch.setattr(file_sources, "WAIT_S", 60.0)
    a = shelf("a", "peer", chunks=1 if kind == "waiting" else 6)
    if kind == "reading":
        a.fault = lambda stage, at: time.sleep(0.1 if stage == "read" else 0)
    if kind == "asking":
        a.fault = broken_from("open")
    read = Read(a)
    threading.Timer(0.2, read.stop.set).start()
    began = time.monotonic()
    with pytest.raises(PullFailed, match="stopped"):
        read.run()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [OSError, MemoryError, UnicodeError])
def test_any_error_of_a_source_is_a_failure_of_that_source(stage: str, error: type[Exception]) -> None:
    a, b = shelf("a", "peer"), shelf("b")

    def fault(now: str, at: int) -> None:
        if now == stage:
            raise error("odd")

    a.fault = fault
    read = Read(a, b).run()
    assert set(read.why()) == {("a", "unreachable")}


def test_an_error_of_the_reader_itself_is_raised() -> None:
    a = shelf("a")
    read = Read(a, parallel=3)

    def of(stop: int) -> SourceRef:
        raise ZeroDivisionError

    read.sources.of = of  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        read.run()
