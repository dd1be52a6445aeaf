"""Downloads one file into a buffer: ranges in parallel, every chunk verified, no byte requested twice without need.

The chunks may come from several servers. Connections are spread over the servers that still have missing chunks, with
at least one for each, so that all of them send at once.

- A chunk is in `verified` only after its bytes in the buffer were hashed and the checksum matched. A damaged chunk is
  downloaded again, at most `tries` times.
- After a broken connection a range continues at the next byte. The download fails only if the connection breaks `tries`
  times in a row without a byte received in between; the wait after each break grows exponentially. If one of several
  servers fails, the download fails, and the error names that server.
- A connection reads from the socket directly into the caller's buffer, and the caller knows every byte that arrived
  before a break; the standard library's HTTP client does not report that. Every wait ends: with bytes, after
  `timeout_s` without any (ConnectionBroken), or within POLL_S after `stopped` returns true (PullFailed).
- However the download ends, `verified` is correct: the next download into this buffer requests only the missing chunks.
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NoReturn, TypeVar
from urllib.parse import urlsplit

import xxhash

from windfall.backoff import delay_s
from windfall.errors import WindfallError
from windfall.link.network import in_url
from windfall.weights.manifest import MAX_MANIFEST_BYTES, Manifest

POLL_S = 0.25
MAX_HEAD_BYTES = 16 << 10
READ_BYTES = 1 << 20  # bytes read at once, and hashed while they are still in the CPU's cache
SPAN_BYTES = 256 << 20  # maximum of one request, so that a slow connection leaves work for the others
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
T = TypeVar("T")


class PullFailed(Exception):
    """The weights could not be pulled; the text says what failed."""


class PullGone(PullFailed):
    """The server does not have this version any more, or not yet. The caller should pull a newer one."""


class PullDamaged(PullFailed):
    """The same bytes arrived damaged on every attempt."""


class ConnectionBroken(Exception):
    """The connection failed; a retry may succeed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    host: str
    port: int
    tls: ssl.SSLContext | None
    key: str
    timeout_s: float  # seconds without a byte after which a connection counts as broken

    @property
    def name(self) -> str:
        return f"{in_url(self.host)}:{self.port}"


def parse_address(url: str, *, key: str, timeout_s: float, tls: ssl.SSLContext | None) -> Address:
    fix = "Use an address like http://10.0.0.5:9001."
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise WindfallError(f"not an address: {e}", where=url, fix=fix) from e
    if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query:
        raise WindfallError("not the address of a weight server", where=url, fix=fix)
    if parts.scheme == "http" and tls is not None:
        raise WindfallError("TLS is configured, but the address is not https", where=url, fix="Use https://.")
    if parts.scheme == "https":
        tls = tls or ssl.create_default_context()
    return Address(host=host, port=port or (443 if tls else 80), tls=tls, key=key, timeout_s=timeout_s)


def _connect(to: Address) -> socket.socket:
    try:
        sock = socket.create_connection((to.host, to.port), timeout=to.timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return to.tls.wrap_socket(sock, server_hostname=to.host) if to.tls else sock
        except OSError:
            sock.close()
            raise
    except ssl.SSLCertVerificationError as e:
        raise PullFailed(f"the certificate of {to.name} is not trusted: {e.verify_message}") from e
    except OSError as e:
        raise ConnectionBroken(f"connecting to {to.name}: {e}") from e


class WeightConnection:
    def __init__(self, to: Address, stopped: Callable[[], bool]) -> None:
        self.to = to
        self._stopped = stopped
        self._buffered = b""
        self._sock, self._flags = _connect(to), 0
        slice_s = min(POLL_S, to.timeout_s)
        self._sock.settimeout(slice_s)
        if not to.tls and sys.platform == "linux":
            # The kernel enforces the timeout: one call per read instead of two, and it may wait for the whole piece.
            self._sock.settimeout(None)
            limit = struct.pack("@ll", int(slice_s), int(slice_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._flags = socket.MSG_WAITALL

    def get(self, path: str, start: int = 0, stop: int | None = None) -> int:
        """Request bytes `start` to `stop` of `path`. Returns their number; they must be read before the next `get`."""
        head = f"GET {path} HTTP/1.1\r\nHost: {self.to.name}\r\nAuthorization: Bearer {self.to.key}\r\n"
        head += "\r\n" if stop is None else f"Range: bytes={start}-{stop - 1}\r\n\r\n"
        try:
            self._sock.sendall(head.encode())
        except OSError as e:
            raise ConnectionBroken(f"requesting {path} from {self.to.name}: {e}") from e
        status, length = self._read_head(path)
        if status != (200 if stop is None else 206):
            self._raise_refused(status, length, path)
        if stop is not None and length != stop - start:
            raise ConnectionBroken(f"{self.to.name} sends {length} bytes of {path}, expected {stop - start}")
        return length

    def read_into(self, view: memoryview) -> int:
        """Read at least one byte and at most the length of the view. Returns the number of bytes read."""
        if self._buffered:
            n = min(len(view), len(self._buffered))
            view[:n], self._buffered = self._buffered[:n], self._buffered[n:]
            return n
        return self._recv(view, self._flags)

    def read(self, length: int) -> bytes:
        data, at = bytearray(length), 0
        while at < length:
            at += self.read_into(memoryview(data)[at:])
        return bytes(data)

    def close(self) -> None:
        self._sock.close()

    def _read_head(self, path: str) -> tuple[int, int]:
        data, piece = b"", bytearray(4096)
        while b"\r\n\r\n" not in data:
            if len(data) > MAX_HEAD_BYTES:
                what = f"a header of more than {MAX_HEAD_BYTES} bytes"
                raise ConnectionBroken(f"{self.to.name} answered {path} with {what}")
            data += piece[: self._recv(memoryview(piece), 0)]
        head, _, self._buffered = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        status, length = first.split(" ")[1:2], fields.get("content-length", "")
        if not first.startswith("HTTP/1.") or not status or not status[0].isdigit() or not length.isdigit():
            raise ConnectionBroken(f"{self.to.name} answered {path} unlike a weight server")
        return int(status[0]), int(length)

    def _raise_refused(self, status: int, length: int, path: str) -> NoReturn:
        try:
            why = self.read(min(length, 500)).decode(errors="replace").strip()
        except ConnectionBroken:
            why = ""
        what = f"{self.to.name} refused {path}: {status} {why}".strip()
        if status in (404, 410):
            raise PullGone(what)
        if status >= 500:
            raise ConnectionBroken(what)
        raise PullFailed(what)

    def _recv(self, view: memoryview, flags: int) -> int:
        started = time.monotonic()
        while True:
            if self._stopped():
                raise PullFailed(f"stopped while reading from {self.to.name}")
            try:
                n = self._sock.recv_into(view, 0, flags) if flags else self._sock.recv_into(view)
            except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as e:
                if time.monotonic() - started >= self.to.timeout_s:
                    raise ConnectionBroken(f"waited {self.to.timeout_s:g} s for {self.to.name} to send") from e
                continue
            except OSError as e:
                raise ConnectionBroken(f"reading from {self.to.name}: {e}") from e
            if n == 0:
                raise ConnectionBroken(f"{self.to.name} closed the connection")
            return n


@dataclass
class Retry:
    """Counts broken connections in a row, and backs off between them."""

    tries: int
    stop: threading.Event
    stopped: Callable[[], bool]
    failures: int = 0
    total: int = 0

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
            with closing(WeightConnection(to, retry.stopped)) as connection:
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
        source: Manifest,
        verified: list[int | None],
        *,
        tries: int,
        stop: threading.Event,
        on_bytes: Callable[[int], None],
    ) -> None:
        """`verified` (checksums of the buffer's chunks) is updated. `on_bytes` is called by one thread at a time."""
        self.servers = servers
        self.path = path
        self.view = view
        self.chunks = source.checksums()
        self._bounds = source.bounds()
        self._server_of = source.chunk_servers()
        self._chunk_bytes = source.chunk_bytes
        self.verified = verified
        self.tries = tries
        self.stop = stop
        self._on_bytes = on_bytes
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
        self, to: Address, first: int, stop: int, connection: WeightConnection | None, retry: Retry
    ) -> WeightConnection | None:
        """Download chunks `first` to `stop`. Returns the connection for the next span."""
        chunk, at, end, hasher = first, self._bounds[first], self._bounds[stop], xxhash.xxh3_64()
        while at < end:
            try:
                connection = connection or WeightConnection(to, self._stopped)
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
