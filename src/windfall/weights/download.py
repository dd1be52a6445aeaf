"""Reads one file into a buffer: ranges in parallel, every chunk verified.

- A chunk counts only after its bytes in the buffer were verified: by its checksum if all of them came from trusted
  sources, otherwise by its seal. A damaged chunk is requested once more; a source that sends it wrong again is dropped.
- After a break a span of chunks goes on at the next byte, perhaps at another source (file_sources.py).
- Connections are spread over the sources that still have missing chunks, and all read in the order of the file, so that
  a reader that follows another finds its chunks. Every second their number doubles, while that makes the read faster:
  one connection over a long way is slow.
- Spans become shorter towards the end, over slow connections also shorter than a chunk: otherwise all would wait for
  the slowest connection. Who reads the last bytes of a chunk verifies it.
- However the read ends, `done` was called for each chunk that is verified.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable

from windfall.errors import WindfallError
from windfall.link.messages import SourceRef
from windfall.weights.file_sources import FileSources
from windfall.weights.manifest import Manifest, decode
from windfall.weights.source import Source, SourceBroken, SourceWrong

SPAN_BYTES = 64 << 20  # maximum of one request, so that a slow connection leaves work for the others
SPAN_S = 0.25  # what a connection should read in at least so long is one request
FIRST_SPAN_BYTES, LEAST_SPAN_BYTES = 1 << 20, 256 << 10  # minimum of one request, while no rate is known and then
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
    if source is not None:
        source.close()
    return found[0]


class Download:
    def __init__(
        self,
        sources: FileSources,
        manifest: Manifest,
        view: memoryview,
        missing: Iterable[int],
        done: Callable[[int], None],
    ) -> None:
        """Reads the `missing` chunks into `view`, which is as long as the file. Threads call `done` for each."""
        self.sources = sources
        sources.verified = self._first_missing
        self.manifest = manifest
        self.view = view
        self._done = done
        self._bounds = manifest.bounds()
        self._lock = threading.Lock()
        self._missing = set(missing)
        self._grouped: object = None
        """The route by which the queues were made."""
        self._queues: dict[tuple[SourceRef, ...], deque[int]] = {(): deque(sorted(self._missing))}
        """By sources: the chunks that are not all requested."""
        self._requested: dict[int, int] = {}
        """By chunk in a queue: where the part that is not requested begins, if not at its start."""
        self._arrived: dict[int, tuple[int, dict[str, bool]]] = {}
        """By chunk that is not complete: bytes, and for each source of them whether it is trusted."""
        self._threads: list[threading.Thread] = []
        self._damaged: set[tuple[int, str]] = set()
        self._received, self._reading_s = 0, 0.0
        """Bytes, and how long connections have waited for them, in sum."""
        self._error: Exception | None = None

    def run(self, parallel: int) -> None:
        """`parallel`: connections at the beginning; at least one for each group of sources."""
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
        useful = len(self._missing) * max(1, self.manifest.chunk_bytes // FIRST_SPAN_BYTES)
        numbers = range(len(self._threads), len(self._threads) + min(count, useful))
        new = [threading.Thread(target=self._read_spans, args=(n,), name=f"pull-{n}", daemon=True) for n in numbers]
        self._threads += new
        for t in new:
            t.start()

    def _read_spans(self, number: int) -> None:
        source, of = None, ()
        try:
            while (found := self._next_span(number, of)) is not None:
                of, start, stop = found
                source = self._read_span(start, stop, source)
        except Exception as e:  # fault boundary: `run` raises it
            self._error = self._error or e
            self.sources.give_up()
        finally:
            if source is not None:
                source.close()

    def _next_span(self, number: int, of: tuple[SourceRef, ...]) -> tuple[tuple[SourceRef, ...], int, int] | None:
        """Bytes `start` to `stop` of the same sources as before, if these have more, and otherwise of others."""
        with self._lock:
            self._group()
            if not self._queues.get(of):
                self._queues = {key: queue for key, queue in self._queues.items() if queue}
                if not self._queues:
                    return None
                of = list(self._queues)[number % len(self._queues)]
            queue, bounds = self._queues[of], self._bounds
            left = len(queue) * self.manifest.chunk_bytes
            longest = max(self._least_bytes(), min(SPAN_BYTES, left // (4 * len(self._threads))))
            chunk = queue.popleft()
            start, stop = self._requested.pop(chunk, bounds[chunk]), bounds[chunk + 1]
            if stop - start > longest:
                stop = self._requested[chunk] = start + longest
                queue.appendleft(chunk)
            while queue and bounds[queue[0]] == stop and bounds[queue[0] + 1] - start <= longest:
                stop = bounds[queue.popleft() + 1]
            return of, start, stop

    def _least_bytes(self) -> int:
        if not self._reading_s:
            return min(FIRST_SPAN_BYTES, self.manifest.chunk_bytes)
        rate = self._received / self._reading_s  # of one connection
        return min(max(LEAST_SPAN_BYTES, int(SPAN_S * rate)), self.manifest.chunk_bytes)

    def _group(self) -> None:
        """Arrange the chunks anew if the route has changed."""
        if self._grouped is not self.sources.route:
            self._grouped, left = self.sources.route, sorted(i for queue in self._queues.values() for i in queue)
            self._queues = {}
            for i in left:
                self._queues.setdefault(self.sources.of(self._bounds[i + 1]), deque()).append(i)

    def _read_span(self, start: int, stop: int, source: Source | None) -> Source | None:
        """Read these bytes. Returns the source for the next span."""
        at, end = start, stop

        def read(source: Source) -> None:
            nonlocal at, end
            began_s = time.monotonic()
            promised = at + source.open(self.sources.file, at, end)
            while at < promised:
                chunk = self._chunk(at)
                n = self._receive(chunk, source, self.view[at : min(self._bounds[chunk + 1], promised)])
                at += n
                if (senders := self._complete(chunk)) is not None:
                    first, limit = self._bounds[chunk], self._bounds[chunk + 1]
                    if not self.manifest.is_chunk(chunk, self.view[first:limit], trusted=all(senders.values())):
                        at, end = first, max(end, limit)
                        self._reject(chunk, source, alone=len(senders) == 1)
                    self._finish(chunk)
                    self.sources.verify(source.ref.id)
                if at < end:
                    self.sources.check_pace(source.ref.id, n, began_s)
                began_s = time.monotonic()

        while at < end:
            source = self.sources.attempt(self._bounds[self._chunk(at) + 1], source, read)
        return source

    def _chunk(self, at: int) -> int:
        return bisect_right(self._bounds, at) - 1

    def _receive(self, chunk: int, source: Source, view: memoryview) -> int:
        began_s, id = time.monotonic(), source.ref.id
        n = source.read_into(view)
        self.sources.count(id, n)
        with self._lock:
            self._received += n
            self._reading_s += time.monotonic() - began_s
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

    def _finish(self, chunk: int) -> None:
        self._done(chunk)
        with self._lock:
            self._missing.discard(chunk)

    def _first_missing(self) -> int:
        with self._lock:
            return self._bounds[min(self._missing, default=len(self._bounds) - 1)]

    def _reject(self, chunk: int, source: Source, *, alone: bool) -> None:
        """`alone`: all bytes of the chunk came from this source."""
        what = f"{source.ref.location} sent chunk {chunk} of {self.sources.file} damaged"
        if (chunk, source.ref.id) in self._damaged:
            raise SourceWrong(f"{what} twice")
        if alone:
            self._damaged.add((chunk, source.ref.id))
        raise SourceBroken(what)
