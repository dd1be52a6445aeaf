"""One connection to a weight server: requests bytes and reads them into existing memory.

Reads go from the socket directly into the caller's buffer, and the caller knows every byte that arrived before a break;
the standard library's HTTP client does not report that. Every wait ends: with bytes, after `timeout_s` without any
(ConnectionBroken), or within POLL_S after `stopped` returns true (PullFailed).
"""

from __future__ import annotations

import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn
from urllib.parse import urlsplit

from windfall.errors import WindfallError

POLL_S = 0.25
MAX_HEAD_BYTES = 16 << 10


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
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


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


class Connection:
    def __init__(self, to: Address, stopped: Callable[[], bool]) -> None:
        self.to, self._stopped, self._buffered = to, stopped, b""
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
