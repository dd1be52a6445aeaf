"""Reads one file into a buffer: ranges in parallel, every chunk verified.

- A chunk counts only after its bytes in the buffer were verified: by its checksum if all of them came from trusted
  sources, otherwise by its seal. A damaged chunk is requested once more; a source that sends it wrong again is dropped.
  If it came from several sources, it is not known whose bytes are wrong.
- After a break a span of chunks goes on at the next byte, perhaps at another source (file_sources.py).
- Connections are spread over the sources that still have missing chunks, and all read in the order of the file, so that
  a reader that follows another finds its chunks. One connection over a long way is slow: there are more, the longer it
  takes to connect, and every second their number doubles, while that makes the read faster.
- When all chunks are requested and those that still read leave the link idle, a connection that has nothing to do takes
  over a part of what the slowest one has left: otherwise all would wait for that. What was on its way is lost, so a
  busy link is left alone. Who reads the last bytes of a chunk verifies it.
- However the read ends, the file has each chunk that is verified.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

from windfall.errors import WindfallError
from windfall.link.messages import SourceRef
from windfall.weights.held_files import HeldFile
from windfall.weights.manifest import Manifest, decode
from windfall.weights.pulling.file_sources import POLL_S, FileSources
from windfall.weights.pulling.source import Source, SourceBroken, SourceWrong

SPAN_BYTES = 64 << 20  # maximum of one request, so that a slow connection leaves work for the others
SLOW_READ_S, SLOW_READ_BYTES = 0.25, 64 << 10
"""A connection reads for about this long at a time, and at least so much: the rest of its span can be taken over."""
TAKE_OVER_S, TAKE_OVER_TRIPS = 0.5, 4
"""A connection that needs longer than this (seconds), and than these round trips, for its span gives away a part."""
IDLE_SHARE = 0.6  # below this share of the best rate of the read, the link is idle
MAX_CONNECTIONS = 64
CONNECTING_S = 0.02  # one connection at the start for each such part of the time that connecting takes
GROWTH = 1.2  # twice the connections must make a read this much faster
SLOW_S, SLOW_SHARE = 5, 0.25
"""A read below this share of its best rate for this long (seconds) is reported."""


def read_manifest(sources: FileSources) -> Manifest:
    found: list[Manifest] = []

    def read(source: Source) -> None:
        data = source.manifest(sources.file)
        sources.count(source.ref.id, len(data))
        try:
            found.append(decode(data, sources.file))
        except WindfallError as e:
            raise SourceWrong(f"{source.ref.location} has a wrong manifest of {sources.file}: {e}") from e
        sources.verify(source.ref.id)

    source = None
    while not found:
        source = sources.attempt(1, source, read)
    sources.leave(source)
    return found[0]


@dataclass(slots=True)
class Span:
    """What a connection is reading."""

    at: int
    stop: int
    reading: int
    """The end of the part that is being read. What is behind it can be taken over."""
    byte_s: float
    """Seconds per byte; a mean in which the last read counts half. 0: not known."""

    @property
    def left_s(self) -> float:
        return (self.stop - self.reading) * self.byte_s


class Download:
    def __init__(self, sources: FileSources, held: HeldFile) -> None:
        """Reads what is missing of a file into its buffer."""
        self.sources = sources
        self.held = held
        sources.verified = self._first_missing
        self._view = held.buffer.view
        self._bounds = held.manifest.bounds()
        self._lock = threading.Condition()
        self._grouped: object = None
        """The route by which the queues were made."""
        self._queues: dict[SourceRef | None, deque[int]] = {None: deque(held.missing())}
        """By source: the chunks that no connection has begun."""
        self._spans: dict[int, Span] = {}
        """By thread."""
        self._arrived: dict[int, tuple[int, dict[str, bool]]] = {}
        """By chunk that is not complete: bytes, and for each source of them whether it is trusted."""
        self._threads: list[threading.Thread] = []
        self._damaged: set[tuple[int, str]] = set()
        self._received = 0
        self._best = 0
        """Most bytes of a second."""
        self._error: Exception | None = None

    def run(self, parallel: int) -> None:
        """`parallel`: connections at the beginning; at least one for each source."""
        with self._lock:
            self._group()
        far = min(MAX_CONNECTIONS, int(self.sources.connecting_s / CONNECTING_S))
        self._start(max(parallel, far, len(self._queues)))
        rate = last = slow_s = counted = 0
        while any(t.is_alive() for t in self._threads):
            ends_s = time.monotonic() + 1.0
            for t in self._threads:  # every wait of a thread ends
                t.join(max(0.0, ends_s - time.monotonic()))
            received = self._received
            last, rate, counted = rate, received - counted, received
            if rate > GROWTH * last and self._best == last:
                self._start(min(len(self._threads), MAX_CONNECTIONS - len(self._threads)))
            self._best = max(self._best, rate)
            slow_s = slow_s + 1 if rate < SLOW_SHARE * self._best else 0
            if slow_s == SLOW_S:
                self.sources.report_slow()
        if self._error is not None:
            raise self._error

    def _start(self, count: int) -> None:
        numbers = range(len(self._threads), len(self._threads) + min(count, len(self.held.missing())))
        new = [threading.Thread(target=self._read_spans, args=(n,), name=f"pull-{n}", daemon=True) for n in numbers]
        self._threads += new
        for t in new:
            t.start()

    def _read_spans(self, number: int) -> None:
        source = of = None
        try:
            while (found := self._next_span(number, of)) is not None:
                of, span = found
                source = self._read_span(span, source)
        except Exception as e:  # fault boundary: `run` raises it
            self._error = self._error or e
            self.sources.give_up()
        finally:
            with self._lock:
                self._spans.pop(number, None)
                self._lock.notify_all()
            if source is not None:
                source.close()

    def _next_span(self, number: int, of: SourceRef | None) -> tuple[SourceRef | None, Span] | None:
        """The next range: of the same source as before if it has more, otherwise of another one."""
        with self._lock:
            before = self._spans.pop(number, None)
            self._lock.notify_all()
            byte_s = before.byte_s if before is not None else 0.0
            self._group()
            if not self._queues.get(of):
                self._queues = {key: queue for key, queue in self._queues.items() if queue}
                if not self._queues:
                    if (taken := self._take_over(byte_s)) is None:
                        return None
                    self._spans[number] = taken
                    return of, taken
                of = list(self._queues)[number % len(self._queues)]
            queue = self._queues[of]
            longest = max(1, min(SPAN_BYTES // self.held.manifest.chunk_bytes, len(queue) // (4 * len(self._threads))))
            first = stop = queue.popleft()
            stop += 1
            while queue and queue[0] == stop and stop - first < longest:
                stop = queue.popleft() + 1
            start = self._bounds[first]
            self._spans[number] = Span(start, self._bounds[stop], start, byte_s)
            return of, self._spans[number]

    def _take_over(self, byte_s: float) -> Span | None:
        """Wait until a connection is too slow, and take over so much that both end at the same time. None: all have
        ended. `byte_s`: of the connection that asks."""
        least_s = max(TAKE_OVER_S, TAKE_OVER_TRIPS * self.sources.connecting_s)
        while self._spans and not self.sources.stopped():
            slowest = max(self._spans.values(), key=lambda span: span.left_s)
            left = slowest.stop - slowest.reading
            rate = sum(1 / span.byte_s for span in self._spans.values() if span.byte_s)
            if rate < IDLE_SHARE * self._best and slowest.left_s > least_s and left > SLOW_READ_BYTES:
                byte_s = byte_s or slowest.byte_s
                middle = slowest.reading + 1 + int((left - 2) * byte_s / (slowest.byte_s + byte_s))
                taken = Span(middle, slowest.stop, middle, byte_s)
                slowest.stop = middle
                return taken
            self._lock.wait(POLL_S)
        return None

    def _group(self) -> None:
        """Arrange the chunks anew if the route has changed."""
        if self._grouped is not self.sources.route:
            self._grouped, left = self.sources.route, sorted(i for queue in self._queues.values() for i in queue)
            self._queues = {}
            for i in left:
                self._queues.setdefault(self.sources.of(self._bounds[i + 1]), deque()).append(i)

    def _read_span(self, span: Span, source: Source | None) -> Source | None:
        """Returns the source for the next span."""
        unread = False

        def read(source: Source) -> None:
            nonlocal unread
            began_s = time.monotonic()
            promised = span.at + source.open(self.sources.file, span.at, span.stop)
            while not unread and span.at < min(span.stop, promised):
                chunk = self._chunk(span.at)
                n = self._receive(chunk, source, span, promised)
                senders = self._complete(chunk)
                if senders is not None and not self._verify(chunk, source, span, senders):
                    unread = True
                elif span.at < span.stop:
                    self.sources.check_pace(source.ref.id, n, began_s)
                began_s = time.monotonic()
            unread = unread or span.at < promised

        while span.at < span.stop:
            source = self.sources.attempt(self._bounds[self._chunk(span.at) + 1], source, read)
            if unread and source is not None:  # it sends what it has promised, which is not needed
                source.close()
                source, unread = None, False
        return source

    def _chunk(self, at: int) -> int:
        return bisect_right(self._bounds, at) - 1

    def _receive(self, chunk: int, source: Source, span: Span, promised: int) -> int:
        """Read once. Returns the number of bytes."""
        with self._lock:
            most = max(SLOW_READ_BYTES, int(SLOW_READ_S / (span.byte_s or 1.0)))
            span.reading = min(span.stop, promised, self._bounds[chunk + 1], span.at + most)
            view = self._view[span.at : span.reading]
        began_s, id = time.monotonic(), source.ref.id
        n = source.read_into(view)
        self.sources.count(id, n)
        with self._lock:
            self._received += n
            last_s = (time.monotonic() - began_s) / n
            span.byte_s = 0.5 * ((span.byte_s or last_s) + last_s)
            span.at += n
            span.reading = span.at
            arrived, senders = self._arrived.get(chunk, (0, {}))
            senders[id] = senders.get(id, True) and source.trusted
            self._arrived[chunk] = arrived + n, senders
        return n

    def _complete(self, chunk: int) -> dict[str, bool] | None:
        """The sources of a chunk, if all of its bytes have come, and whether each is trusted."""
        with self._lock:
            if self._arrived[chunk][0] < self._bounds[chunk + 1] - self._bounds[chunk]:
                return None
            return self._arrived.pop(chunk)[1]

    def _verify(self, chunk: int, source: Source, span: Span, senders: dict[str, bool]) -> bool:
        """Whether the bytes of a chunk are right. Otherwise the span is extended: all of them are read again."""
        start, stop = self._bounds[chunk], self._bounds[chunk + 1]
        if self.held.manifest.is_chunk(chunk, self._view[start:stop], trusted=all(senders.values())):
            self.held.add(chunk)
            self.sources.verify(source.ref.id)
            return True
        with self._lock:
            span.at = span.reading = start
            span.stop = max(span.stop, stop)
        if len(senders) == 1:
            self._reject(chunk, source)
        return False

    def _first_missing(self) -> int:
        return self._bounds[min(self.held.missing(), default=-1)]

    def _reject(self, chunk: int, source: Source) -> None:
        what = f"{source.ref.location} sent chunk {chunk} of {self.sources.file} damaged"
        if (chunk, source.ref.id) in self._damaged:
            raise SourceWrong(f"{what} twice")
        self._damaged.add((chunk, source.ref.id))
        raise SourceBroken(what)
