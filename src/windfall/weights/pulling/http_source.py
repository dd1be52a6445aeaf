"""A weight server (serve.py) as a source of files.

A connection reads from the socket directly into the caller's buffer, and the caller knows every byte that arrived
before a break; the standard library's HTTP client does not report that. Every wait ends: with bytes, after the time
limit without any (SourceStalled), or within POLL_S after `stopped` returns true (SourceBroken).
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn
from urllib.parse import urlsplit

from windfall.link.messages import SourceRef
from windfall.link.network import in_url
from windfall.weights.manifest import MAX_MANIFEST_BYTES
from windfall.weights.pulling.source import (
    CONNECT_S,
    PEER_CONNECT_S,
    PEER_SILENT_S,
    Pace,
    SourceBroken,
    SourceGone,
    SourceStalled,
    SourceWaits,
)

POLL_S = 0.25
MAX_HEAD_BYTES = 16 << 10
MAX_WHY_BYTES = 500


class HttpSource:
    def __init__(
        self, ref: SourceRef, *, key: str, tls: ssl.SSLContext | None, timeout_s: float, stopped: Callable[[], bool]
    ) -> None:
        """Connect. Raises SourceBroken if that fails."""
        self.ref = ref
        self.trusted = ref.kind == "trainer"
        self._key = key
        self._stopped = stopped
        self._silent_s = min(timeout_s, PEER_SILENT_S) if ref.kind == "peer" else timeout_s
        self._buffered = b""
        self._sock, self._flags = self._connect(tls, timeout_s), 0
        slice_s = min(POLL_S, self._silent_s)
        self._sock.settimeout(slice_s)
        if not isinstance(self._sock, ssl.SSLSocket) and sys.platform == "linux":
            # The kernel enforces the timeout: one call per read instead of two, and it may wait for the whole piece.
            self._sock.settimeout(None)
            limit = struct.pack("@ll", int(slice_s), int(slice_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._flags = socket.MSG_WAITALL

    def manifest(self, file: str) -> bytes:
        length = self._get(f"/weights/{file}/manifest", 200)
        if length > MAX_MANIFEST_BYTES:
            raise self._broken(f"its manifest of {file} has {length} bytes; the limit is {MAX_MANIFEST_BYTES}")
        return self._read(length)

    def open(self, file: str, start: int, stop: int) -> int:
        length = self._get(f"/weights/{file}", 206, f"Range: bytes={start}-{stop - 1}\r\n")
        if not 1 <= length <= stop - start:
            raise self._broken(f"sends {length} bytes of {file}, but {stop - start} were requested")
        return length

    def read_into(self, view: memoryview) -> int:
        if self._buffered:
            n = min(len(view), len(self._buffered))
            view[:n], self._buffered = self._buffered[:n], self._buffered[n:]
            return n
        return self._receive(view, self._flags, time.monotonic())

    def close(self) -> None:
        self._sock.close()

    def ends(self) -> tuple[Any, Any]:
        """The addresses of the connection: the server's and this process's."""
        try:
            return self._sock.getpeername(), self._sock.getsockname()
        except OSError as e:
            raise self._broken(f"connecting: {e}") from e

    def _connect(self, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
        limit_s = min(timeout_s, PEER_CONNECT_S if self.ref.kind == "peer" else CONNECT_S)
        try:
            parts = urlsplit(self.ref.location)
            host, secure = parts.hostname or "", parts.scheme == "https"
            port = parts.port or (443 if secure else 80)
        except ValueError as e:
            raise self._broken(f"not an address: {e}") from e
        if parts.scheme not in ("http", "https") or not host or parts.path not in ("", "/") or parts.query:
            raise self._broken("not the address of a weight server, which is like http://10.0.0.5:9001")
        self._host = f"{in_url(host)}:{port}"
        if tls is not None and not secure and not self._may_be_plain:
            raise self._broken("TLS is configured, but the address is not https")
        try:
            sock = socket.create_connection((host, port), timeout=limit_s)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                context = tls or ssl.create_default_context() if secure else None
                return context.wrap_socket(sock, server_hostname=host) if context else sock
            except OSError:
                sock.close()
                raise
        except ssl.SSLCertVerificationError as e:
            raise self._broken(f"its certificate is not trusted: {e.verify_message}") from e
        except OSError as e:
            raise self._broken(f"connecting: {e}") from e

    _may_be_plain = False
    """Whether the key may be sent unencrypted although TLS is configured."""

    def _get(self, path: str, expected: int, lines: str = "") -> int:
        """Send a request. Returns the length of the answer, which must be read before the next request."""
        head = f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {self._key}\r\n{lines}\r\n"
        try:
            self._sock.sendall(head.encode())
        except OSError as e:
            raise self._broken(f"requesting {path}: {e}") from e
        status, length = self._read_head(path)
        if status != expected:
            self._raise_refused(path, status, length)
        return length

    def _read_head(self, path: str) -> tuple[int, int]:
        data, piece, began_s = b"", bytearray(4096), time.monotonic()
        while b"\r\n\r\n" not in data:
            if len(data) > MAX_HEAD_BYTES:
                raise self._broken(f"it answered {path} with a header of more than {MAX_HEAD_BYTES} bytes")
            data += piece[: self._receive(memoryview(piece), 0, began_s)]
        head, _, self._buffered = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        numbers = *first.split(" ")[1:2], fields.get("content-length", "")
        if not first.startswith("HTTP/1.") or len(numbers) != 2 or not all(map(_is_number, numbers)):
            raise self._broken(f"it answered {path} unlike a weight server")
        return int(numbers[0]), int(numbers[1])

    def _raise_refused(self, path: str, status: int, length: int) -> NoReturn:
        why = self._read(min(length, MAX_WHY_BYTES)).decode(errors="replace").strip()
        what = f"refused {path}: {status} {why}".strip()
        # A worker that is to read the same file may not have begun yet.
        if status == 503 or (status == 404 and self.ref.kind == "peer"):
            raise SourceWaits(self._named(what))
        raise SourceGone(self._named(what)) if status in (404, 410) else self._broken(what)

    def _read(self, length: int) -> bytes:
        data, at, pace = bytearray(length), 0, Pace()
        while at < length:
            began_s = time.monotonic()
            at += (n := self.read_into(memoryview(data)[at:]))
            if not pace.add(n, began_s):
                raise SourceStalled(self._named("sends too slowly"))
        return bytes(data)

    def _receive(self, view: memoryview, flags: int, began_s: float) -> int:
        """`began_s`: when the wait for these bytes began, which has a limit (monotonic clock, seconds)."""
        while True:
            if self._stopped():
                raise self._broken("stopped")
            if time.monotonic() - began_s >= self._silent_s:
                raise SourceStalled(self._named(f"sent no byte for {self._silent_s:g} s, or no whole header"))
            try:
                n = self._sock.recv_into(view, 0, flags) if flags else self._sock.recv_into(view)
            except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
                continue
            except OSError as e:
                raise self._broken(f"reading: {e}") from e
            if n == 0:
                raise self._broken("closed the connection")
            return n

    def _named(self, what: str) -> str:
        return f"{self.ref.kind} {self.ref.location}: {what}"

    def _broken(self, what: str) -> SourceBroken:
        return SourceBroken(self._named(what))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16
