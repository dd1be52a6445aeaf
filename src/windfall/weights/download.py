"""Moves one file of bytes into a buffer: ranges in parallel, every chunk verified, nothing fetched twice in vain.

- A chunk is in `have` only after its bytes in the buffer were hashed and found right; a chunk that comes wrong is
  fetched again, at most `tries` times.
- After a break a range goes on at the next byte. Only `tries` breaks in a row without one byte between them end the
  fetch; the waits between them grow.
- Whatever ends the fetch, `have` is right: the next fetch into this buffer asks only for what is missing.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import xxhash

from windfall.backoff import delay_s
from windfall.weights.connection import Address, Connection, ConnectionBroken, PullDamaged, PullFailed, PullGone

PIECE_BYTES = 1 << 20
"""Read, then hashed while it is still in the cache."""
SPAN_BYTES = 256 << 20
"""At most this much is asked for in one request, so that a connection that is slow leaves work for the others."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
T = TypeVar("T")


class Retry:
    """Counts breaks in a row and waits between them."""

    def __init__(self, tries: int, stop: threading.Event, halted: Callable[[], bool]) -> None:
        self.tries, self.stop, self.halted = tries, stop, halted
        self.failures = self.total = 0

    def progress(self) -> None:
        self.failures = 0

    def again(self, why: ConnectionBroken, what: str) -> None:
        """Wait, or give up."""
        self.failures += 1
        if self.failures >= self.tries:
            raise PullFailed(f"{what}: {why}; {self.tries} tries brought no byte") from why
        self.total += 1
        self.stop.wait(delay_s(self.failures - 1, first_s=FIRST_WAIT_S, limit_s=LONGEST_WAIT_S))
        if self.halted():
            raise PullFailed(f"{what}: stopped") from why


def small(to: Address, path: str, limit_bytes: int, retry: Retry, parse: Callable[[bytes], T]) -> tuple[T, int]:
    """A file that is read as a whole, and its size. `parse` raises Broken when it is not what was meant."""
    while True:
        connection = None
        try:
            connection = Connection(to, retry.halted)
            length = connection.get(path)
            if length > limit_bytes:
                raise PullFailed(f"{path} has {length} bytes; at most {limit_bytes} are read")
            return parse(connection.read(length)), length
        except ConnectionBroken as e:
            retry.again(e, path)
        finally:
            if connection:
                connection.close()


class Fetch:
    def __init__(
        self, to: Address, path: str, view: memoryview, chunks: Sequence[int], chunk_bytes: int,
        have: list[int | None], *, tries: int, stop: threading.Event,
        moved: Callable[[int], None] = lambda count: None,
    ) -> None:  # fmt: skip
        """`moved`: told of bytes as they come, by one thread at a time."""
        self.to, self.path, self.view, self.chunks, self.chunk_bytes = to, path, view, chunks, chunk_bytes
        self.have, self.tries, self.stop, self._moved = have, tries, stop, moved
        self.received = self.retries = 0
        self._bad: Counter[int] = Counter()
        self._lock, self._halt = threading.Lock(), threading.Event()
        self._errors: list[PullFailed] = []

    def run(self, parallel: int) -> None:
        missing = [i for i, c in enumerate(self.chunks) if self.have[i] != c]
        for i in missing:
            self.have[i] = None
        self._spans = deque(spans(missing, max(1, min(SPAN_BYTES // self.chunk_bytes, len(missing) // (4 * parallel)))))
        threads = [
            threading.Thread(target=self._work, name=f"pull-{n}", daemon=True)
            for n in range(min(parallel, len(self._spans)))
        ]
        for t in threads:
            t.start()
        for t in threads:  # each of its waits ends within the timeout of a connection
            t.join()
        if self._errors:
            raise next((e for e in self._errors if isinstance(e, PullGone)), self._errors[0])

    def _work(self) -> None:
        retry, connection = Retry(self.tries, self.stop, self._halted), None
        try:
            while self._spans and not self._halted():
                try:
                    first, stop = self._spans.popleft()
                except IndexError:  # another thread took the last one
                    return
                connection = self._span(first, stop, connection, retry)
        except PullFailed as e:
            with self._lock:
                self._errors.append(e)
            self._halt.set()
        finally:
            with self._lock:
                self.retries += retry.total
            if connection:
                connection.close()

    def _halted(self) -> bool:
        return self._halt.is_set() or self.stop.is_set()

    def _span(self, first: int, stop: int, connection: Connection | None, retry: Retry) -> Connection | None:
        """Fetch chunks `first` to `stop`; the connection to go on with."""
        at, end, hasher = first * self.chunk_bytes, min(stop * self.chunk_bytes, len(self.view)), xxhash.xxh3_64()
        while at < end:
            try:
                connection = connection or Connection(self.to, self._halted)
                connection.get(self.path, at, end)
                while at < end:
                    chunk = at // self.chunk_bytes
                    limit = min((chunk + 1) * self.chunk_bytes, end)
                    n = connection.read_into(self.view[at : min(limit, at + PIECE_BYTES)])
                    hasher.update(self.view[at : at + n])
                    at += n
                    retry.progress()
                    with self._lock:
                        self.received += n
                        self._moved(n)
                    if at == limit:
                        right = hasher.intdigest() == self.chunks[chunk]
                        hasher.reset()
                        if not right:
                            at = chunk * self.chunk_bytes
                            self._came_wrong(chunk)
                        self.have[chunk] = self.chunks[chunk]
            except ConnectionBroken as e:
                if connection:
                    connection.close()
                connection = None
                retry.again(e, f"{self.path} at byte {at} of {len(self.view)}")
        return connection

    def _came_wrong(self, chunk: int) -> None:
        self._bad[chunk] += 1
        what = f"chunk {chunk} of {self.path} came wrong from {self.to.name}"
        if self._bad[chunk] >= self.tries:
            raise PullDamaged(f"{what}, {self.tries} times")
        raise ConnectionBroken(what)


def spans(missing: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Runs of neighbours, cut to at most `most`.

    >>> spans([0, 1, 2, 5, 6, 9], 2)
    [(0, 2), (2, 3), (5, 7), (9, 10)]
    """
    out: list[tuple[int, int]] = []
    for i in missing:
        if out and out[-1][1] == i and i - out[-1][0] < most:
            out[-1] = (out[-1][0], i + 1)
        else:
            out.append((i, i + 1))
    return out
