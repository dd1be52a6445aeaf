"""Downloads one file into a buffer: ranges in parallel, every chunk verified, no byte requested twice without need.

- A chunk is in `verified` only after its bytes in the buffer were hashed and the checksum matched. A damaged chunk is
  downloaded again, at most `tries` times.
- After a broken connection a range continues at the next byte. The download fails only if the connection breaks `tries`
  times in a row without a byte received in between; the wait after each break grows exponentially.
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

PIECE_BYTES = 1 << 20  # bytes read at once, and hashed while they are still in the CPU's cache
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
        self, to: Address, path: str, view: memoryview, source: ChunkedManifest, verified: list[int | None], *,
        tries: int, stop: threading.Event, on_bytes: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`verified` (checksums of the buffer's chunks) is updated. `on_bytes` is called by one thread at a time."""
        self.to, self.path, self.view, self.chunks, self.chunk_bytes = to, path, view, source.chunks, source.chunk_bytes
        self.verified, self.tries, self.stop, self._on_bytes = verified, tries, stop, on_bytes
        self.retries = 0
        self._damaged: Counter[int] = Counter()
        self._lock, self._failed = threading.Lock(), threading.Event()
        self._errors: list[PullFailed] = []

    def run(self, parallel: int) -> None:
        missing = [i for i, c in enumerate(self.chunks) if self.verified[i] != c]
        for i in missing:
            self.verified[i] = None
        self._spans = deque(spans(missing, max(1, min(SPAN_BYTES // self.chunk_bytes, len(missing) // (4 * parallel)))))
        threads = [
            threading.Thread(target=self._download_spans, name=f"pull-{n}", daemon=True)
            for n in range(min(parallel, len(self._spans)))
        ]
        for t in threads:
            t.start()
        for t in threads:  # every wait of a thread ends within the timeout of a connection
            t.join()
        if self._errors:
            raise next((e for e in self._errors if isinstance(e, PullGone)), self._errors[0])

    def _download_spans(self) -> None:
        retry, connection = Retry(self.tries, self.stop, self._stopped), None
        try:
            while self._spans and not self._stopped():
                try:
                    first, stop = self._spans.popleft()
                except IndexError:  # another thread took the last one
                    return
                connection = self._download_span(first, stop, connection, retry)
        except PullFailed as e:
            with self._lock:
                self._errors.append(e)
            self._failed.set()
        finally:
            with self._lock:
                self.retries += retry.total
            if connection:
                connection.close()

    def _stopped(self) -> bool:
        return self._failed.is_set() or self.stop.is_set()

    def _download_span(self, first: int, stop: int, connection: Connection | None, retry: Retry) -> Connection | None:
        """Download chunks `first` to `stop`. Returns the connection for the next span."""
        at, end, hasher = first * self.chunk_bytes, min(stop * self.chunk_bytes, len(self.view)), xxhash.xxh3_64()
        while at < end:
            try:
                connection = connection or Connection(self.to, self._stopped)
                connection.get(self.path, at, end)
                while at < end:
                    chunk = at // self.chunk_bytes
                    limit = min((chunk + 1) * self.chunk_bytes, end)
                    n = connection.read_into(self.view[at : min(limit, at + PIECE_BYTES)])
                    hasher.update(self.view[at : at + n])
                    at += n
                    retry.failures = 0
                    with self._lock:
                        self._on_bytes(n)
                    if at == limit:
                        intact = hasher.intdigest() == self.chunks[chunk]
                        hasher.reset()
                        if not intact:
                            at = chunk * self.chunk_bytes
                            self._reject(chunk)
                        self.verified[chunk] = self.chunks[chunk]
            except ConnectionBroken as e:
                if connection:
                    connection.close()
                connection = None
                retry.back_off(e, f"{self.path} at byte {at} of {len(self.view)}")
        return connection

    def _reject(self, chunk: int) -> NoReturn:
        self._damaged[chunk] += 1
        what = f"chunk {chunk} of {self.path} arrived damaged from {self.to.name}"
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
