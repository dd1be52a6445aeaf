"""Reads one file into a buffer: ranges in parallel, every chunk verified.

- A chunk counts only after its bytes in the buffer were verified: by its checksum if all of them came from trusted
  sources, otherwise by its seal. A damaged chunk is requested once more; a source that sends it wrong again is dropped.
- After a break a span of chunks goes on at the next byte, perhaps at another source (file_sources.py).
- Connections are spread over the sources that still have missing chunks, and all read in the order of the file, so that
  a reader that follows another finds its chunks. Every second their number doubles, while that makes the read faster:
  one connection over a long way is slow.
- However the read ends, the file has each chunk that is verified.
"""

from __future__ import annotations

import threading
import time
from collections import deque

from windfall.errors import WindfallError
from windfall.link.messages import SourceRef
from windfall.weights.file_sources import FileSources
from windfall.weights.held_files import HeldFile
from windfall.weights.manifest import Manifest, decode
from windfall.weights.source import Source, SourceBroken, SourceWrong

SPAN_BYTES = 64 << 20  # maximum of one request, so that a slow connection leaves work for the others
MAX_CONNECTIONS = 64
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


class Download:
    def __init__(self, sources: FileSources, held: HeldFile) -> None:
        """Reads what is missing of a file into its buffer."""
        self.sources = sources
        self.held = held
        sources.verified = self._first_missing
        self._view = held.buffer.view
        self._bounds = held.manifest.bounds()
        self._lock = threading.Lock()
        self._grouped: object = None
        """The route by which the queues were made."""
        self._queues: dict[SourceRef | None, deque[int]] = {None: deque(held.missing())}
        """By source: the chunks that no connection has begun."""
        self._threads: list[threading.Thread] = []
        self._damaged: set[tuple[int, str]] = set()
        self._received = 0
        self._error: Exception | None = None

    def run(self, parallel: int) -> None:
        """`parallel`: connections at the beginning; at least one for each source."""
        with self._lock:
            self._group()
        self._start(max(parallel, len(self._queues)))
        best = rate = last = slow_s = 0
        while any(t.is_alive() for t in self._threads):
            before, ends_s = self._received, time.monotonic() + 1.0
            for t in self._threads:  # every wait of a thread ends
                t.join(max(0.0, ends_s - time.monotonic()))
            last, rate = rate, self._received - before
            if rate > GROWTH * last and best == last:
                self._start(min(len(self._threads), MAX_CONNECTIONS - len(self._threads)))
            best = max(best, rate)
            slow_s = slow_s + 1 if rate < SLOW_SHARE * best else 0
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
                of, first, stop = found
                source = self._read_span(first, stop, source)
        except Exception as e:  # fault boundary: `run` raises it
            self._error = self._error or e
            self.sources.give_up()
        finally:
            if source is not None:
                source.close()

    def _next_span(self, number: int, of: SourceRef | None) -> tuple[SourceRef | None, int, int] | None:
        """Chunks `first` to `stop` of the same source as before, if it has more, and otherwise of another one."""
        with self._lock:
            self._group()
            if not self._queues.get(of):
                self._queues = {key: queue for key, queue in self._queues.items() if queue}
                if not self._queues:
                    return None
                of = list(self._queues)[number % len(self._queues)]
            queue = self._queues[of]
            longest = max(1, min(SPAN_BYTES // self.held.manifest.chunk_bytes, len(queue) // (4 * len(self._threads))))
            first = stop = queue.popleft()
            stop += 1
            while queue and queue[0] == stop and stop - first < longest:
                stop = queue.popleft() + 1
            return of, first, stop

    def _group(self) -> None:
        """Arrange the chunks anew if the route has changed."""
        if self._grouped is not self.sources.route:
            self._grouped, left = self.sources.route, sorted(i for queue in self._queues.values() for i in queue)
            self._queues = {}
            for i in left:
                self._queues.setdefault(self.sources.of(self._bounds[i + 1]), deque()).append(i)

    def _read_span(self, first: int, stop: int, source: Source | None) -> Source | None:
        """Read chunks `first` to `stop`. Returns the source for the next span."""
        chunk, at, end = first, self._bounds[first], self._bounds[stop]
        senders: dict[str, bool] = {}  # of the bytes of this chunk: whether each is trusted

        def read(source: Source) -> None:
            nonlocal chunk, at
            began_s = time.monotonic()
            promised = at + source.open(self.sources.file, at, end)
            while at < promised:
                limit = self._bounds[chunk + 1]
                n = source.read_into(self._view[at : min(limit, promised)])
                at += n
                senders[source.ref.id] = senders.get(source.ref.id, True) and source.trusted
                with self._lock:
                    self._received += n
                self.sources.count(source.ref.id, n)
                if at == limit:
                    trusted, alone = all(senders.values()), len(senders) == 1
                    senders.clear()
                    at = self._bounds[chunk]
                    if not self.held.manifest.is_chunk(chunk, self._view[at:limit], trusted=trusted):
                        self._reject(chunk, source, alone)
                    at = limit
                    self.held.add(chunk)
                    self.sources.verify(source.ref.id)
                    chunk += 1
                if at < end:
                    self.sources.check_pace(source.ref.id, n, began_s)
                began_s = time.monotonic()

        while at < end:
            source = self.sources.attempt(self._bounds[chunk + 1], source, read)
        return source

    def _first_missing(self) -> int:
        return self._bounds[min(self.held.missing(), default=-1)]

    def _reject(self, chunk: int, source: Source, alone: bool) -> None:
        """`alone`: all bytes of the chunk came from this source."""
        what = f"{source.ref.location} sent chunk {chunk} of {self.sources.file} damaged"
        if (chunk, source.ref.id) in self._damaged:
            raise SourceWrong(f"{what} twice")
        if alone:
            self._damaged.add((chunk, source.ref.id))
        raise SourceBroken(what)
