"""Downloads one file into a buffer: ranges in parallel, every chunk verified, no byte requested twice without need.

The chunks may come from several servers. Connections are spread over the servers that still have missing chunks, with
at least one for each, so that all of them send at once.

- A chunk is in `verified` only after its bytes in the buffer were hashed and the checksum matched. A damaged chunk is
  downloaded again, at most `tries` times.
- After a broken connection a range continues at the next byte. The download fails only if the connection breaks `tries`
  times in a row without a byte received in between; the wait after each break grows exponentially. If one of several
  servers fails, the download fails, and the error names that server.
- However the download ends, `verified` is correct: the next download into this buffer requests only the missing chunks.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import NoReturn, TypeVar

import xxhash

from windfall.backoff import delay_s
from windfall.errors import WindfallError
from windfall.weights.connection import Address, Connection, ConnectionBroken, PullDamaged, PullFailed, PullGone
from windfall.weights.manifest import MAX_MANIFEST_BYTES, ChunkedManifest

READ_BYTES = 1 << 20  # bytes read at once, and hashed while they are still in the CPU's cache
SPAN_BYTES = 256 << 20  # maximum of one request, so that a slow connection leaves work for the others
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
T = TypeVar("T")


class Retry:
    """Counts broken connections in a row, and backs off between them."""

    def __init__(self, tries: int, stop: threading.Event, stopped: Callable[[], bool]) -> None:
        self.tries, self.stop, self.stopped = tries, stop, stopped
        self.failures = self.total = 0

    def back_off(self, why: Exception, what: str) -> None:
        """Wait before the next attempt, or raise PullFailed after the last one."""
        self.failures += 1
        if self.failures >= self.tries:
            raise PullFailed(f"{what}: {why}; no byte in {self.tries} attempts") from why
        self.total += 1
        self.stop.wait(delay_s(self.failures - 1, first_s=FIRST_WAIT_S, limit_s=LONGEST_WAIT_S))
        if self.stopped():
            raise PullFailed(f"{what}: stopped") from why


def download_manifest(to: Address, path: str, retry: Retry, parse: Callable[[bytes], T]) -> tuple[T, int]:
    """Returns the result of `parse` and the size in bytes. `parse` raises ConnectionBroken or WindfallError if it does
    not get what it expects: the bytes may be damaged, and a retry may succeed."""
    while True:
        try:
            with closing(Connection(to, retry.stopped)) as connection:
                length = connection.get(path)
                if length > MAX_MANIFEST_BYTES:
                    raise PullFailed(f"{path} has {length} bytes; the limit is {MAX_MANIFEST_BYTES}")
                return parse(connection.read(length)), length
        except (ConnectionBroken, WindfallError) as e:
            retry.back_off(e, path)


class Download:
    def __init__(
        self,
        servers: Sequence[Address],
        path: str,
        view: memoryview,
        source: ChunkedManifest,
        verified: list[int | None],
        *,
        tries: int,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> None:
        """`verified` (checksums of the buffer's chunks) is updated. `on_bytes` is called by one thread at a time."""
        self.servers, self.path, self.view, self.chunks = servers, path, view, source.chunks
        self._bounds, self._server_of, self._chunk_bytes = source.bounds(), source.chunk_servers(), source.chunk_bytes
        self.verified, self.tries, self.stop, self._on_bytes = verified, tries, stop, on_bytes
        self.retries = 0
        self._damaged: Counter[int] = Counter()
        self._lock, self._failed = threading.Lock(), threading.Event()
        self._errors: list[PullFailed] = []

    def run(self, parallel: int) -> None:
        missing = [i for i, c in enumerate(self.chunks) if self.verified[i] != c]
        for i in missing:
            self.verified[i] = None
        longest = max(1, min(SPAN_BYTES // self._chunk_bytes, len(missing) // (4 * parallel)))
        by_server: list[list[int]] = [[] for _ in self.servers]
        for i in missing:
            by_server[self._server_of[i]].append(i)
        self._spans = [deque(spans(chunks, longest)) for chunks in by_server]
        busy = [server for server, chunks in enumerate(by_server) if chunks]
        threads = [
            threading.Thread(target=self._download_spans, args=(busy[n % len(busy)],), name=f"pull-{n}", daemon=True)
            for n in range(min(max(parallel, len(busy)), sum(map(len, self._spans))))
        ]
        for t in threads:
            t.start()
        for t in threads:  # every wait of a thread ends within the timeout of a connection
            t.join()
        if self._errors:
            raise next((e for e in self._errors if isinstance(e, PullGone)), self._errors[0])

    def _download_spans(self, server: int) -> None:
        """Download from one server until it has no more spans, then from the one with the most."""
        retry, connection = Retry(self.tries, self.stop, self._stopped), None
        try:
            while (found := self._next_span(server)) is not None and not self._stopped():
                if connection and found[0] != server:
                    connection.close()
                    connection = None
                server, (first, stop) = found
                connection = self._download_span(self.servers[server], first, stop, connection, retry)
        except PullFailed as e:
            with self._lock:
                self._errors.append(e)
            self._failed.set()
        finally:
            with self._lock:
                self.retries += retry.total
            if connection:
                connection.close()

    def _next_span(self, server: int) -> tuple[int, tuple[int, int]] | None:
        with self._lock:
            if not self._spans[server]:
                server = max(range(len(self._spans)), key=lambda i: len(self._spans[i]))
            return (server, self._spans[server].popleft()) if self._spans[server] else None

    def _stopped(self) -> bool:
        return self._failed.is_set() or self.stop.is_set()

    def _download_span(
        self, to: Address, first: int, stop: int, connection: Connection | None, retry: Retry
    ) -> Connection | None:
        """Download chunks `first` to `stop`. Returns the connection for the next span."""
        chunk, at, end, hasher = first, self._bounds[first], self._bounds[stop], xxhash.xxh3_64()
        while at < end:
            try:
                connection = connection or Connection(to, self._stopped)
                connection.get(self.path, at, end)
                while at < end:
                    limit = self._bounds[chunk + 1]
                    n = connection.read_into(self.view[at : min(limit, at + READ_BYTES)])
                    hasher.update(self.view[at : at + n])
                    at += n
                    retry.failures = 0
                    with self._lock:
                        self._on_bytes(n)
                    if at == limit:
                        intact = hasher.intdigest() == self.chunks[chunk]
                        hasher.reset()
                        if not intact:
                            at = self._bounds[chunk]
                            self._reject(chunk, to)
                        self.verified[chunk] = self.chunks[chunk]
                        chunk += 1
            except ConnectionBroken as e:
                if connection:
                    connection.close()
                connection = None
                retry.back_off(e, f"{self.path} at byte {at} of {len(self.view)}")
        return connection

    def _reject(self, chunk: int, to: Address) -> NoReturn:
        self._damaged[chunk] += 1
        what = f"chunk {chunk} of {self.path} arrived damaged from {to.name}"
        if self._damaged[chunk] >= self.tries:
            raise PullDamaged(f"{what}, {self.tries} times")
        raise ConnectionBroken(what)


def spans(missing: Sequence[int], max_chunks: int) -> list[tuple[int, int]]:
    """Runs of consecutive chunks, each at most `max_chunks` long.

    >>> spans([0, 1, 2, 5, 6, 9], 2)
    [(0, 2), (2, 3), (5, 7), (9, 10)]
    """
    out: list[tuple[int, int]] = []
    for i in missing:
        if out and out[-1][1] == i and i - out[-1][0] < max_chunks:
            out[-1] = (out[-1][0], i + 1)
        else:
            out.append((i, i + 1))
    return out
