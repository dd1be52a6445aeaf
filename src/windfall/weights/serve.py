"""Serves the versions of a source over HTTP. Every request is a GET with `Authorization: Bearer KEY`.

    /weights/{version}/manifest                    the manifest
    /weights/{version}/full                        its bytes; `Range: bytes=a-b` for a part of them
    /weights/{version}/delta/{base}/manifest       the delta from the weights with digest `base`
    /weights/{version}/delta/{base}                its bytes, or a part of them
    /weights/base/manifest, /weights/base/full     the same for the base of adapters

401: wrong key. 404: not found. 410: withdrawn, pull a newer version. 413: the request has a body. 416: invalid range.
weights/publish.py has a drawing of the whole path. Rules:

- without TLS, the kernel sends from the buffer to the socket, in a thread for every reader, so several cores serve;
- peers that have not sent the key are limited in time and connections (link/listener.py);
- a reader that takes no byte for WRITE_TIMEOUT_S is disconnected; it may reconnect and continue where it was;
- when a version is withdrawn, the connections that read it are reset before the next piece. The bytes in flight may be
  mixed with newer ones; the reader's checksums detect that.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ssl import SSLContext
from typing import Any

from aiohttp import web

from windfall.errors import WindfallError
from windfall.link import listener
from windfall.weights.buffers import Buffer
from windfall.weights.manifest import ChunkedManifest
from windfall.weights.source import Published, PublishedVersions

SEND_BYTES = 4 << 20
MAX_SENDING = 512  # readers at a time, each with a thread of its own; more of them wait
POLL_US = 250_000  # microseconds that a call waits for a reader whose buffers are full
TLS_PIECE_BYTES = 256 << 10
WRITE_TIMEOUT_S = 30.0
RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")


async def serve(
    source: PublishedVersions,
    *,
    host: str,
    port: int,
    key: str,
    ssl: SSLContext | None = None,
    write_timeout_s: float = WRITE_TIMEOUT_S,
    limits: listener.Listener | None = None,
) -> Server:
    """Start the server; it listens when this returns. Port 0 selects a free port."""
    if not key:
        fix = "Pass the key derived from the run's token."
        raise WindfallError("the weight server has no key", where=f"{host}:{port}", fix=fix)
    limits = limits or listener.Listener()
    server = Server(source, key, ssl is not None, write_timeout_s, limits)
    app = web.Application(middlewares=[server.admit], client_max_size=1024)
    version = "/weights/{version:base|[0-9]{1,15}}"
    delta = f"{version}/delta/{{base:[0-9a-f]{{32}}}}"
    for path, handler in (
        (f"{version}/manifest", server.manifest),
        (f"{version}/full", server.bytes),
        (f"{delta}/manifest", server.manifest),
        (delta, server.bytes),
    ):
        app.router.add_get(path, handler)
    options = {"backlog": 1024, "shutdown_timeout": 0.5, "keepalive_timeout": 60.0}
    server.runner, server.port = await limits.serve(app, host, port, ssl, "Choose another port.", **options)
    return server


class Server:
    port: int
    runner: web.AppRunner

    def __init__(
        self, source: PublishedVersions, key: str, tls: bool, write_timeout_s: float, limits: listener.Listener
    ) -> None:
        self.source = source
        self.key = f"Bearer {key}".encode()
        self.tls = tls
        self.write_timeout_s = write_timeout_s
        self.threads = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="weights")
        self.listener = limits

    async def close(self) -> None:
        self.listener.close()
        await self.runner.cleanup()
        self.threads.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self.key):
            raise web.HTTPUnauthorized(text="wrong key\n")
        self.listener.authenticated(request.transport)
        if request.can_read_body:
            raise web.HTTPRequestEntityTooLarge(1, request.content_length or 1, text="a request must not have a body\n")
        return await handler(request)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        _, manifest, _ = self._find_file(request)
        return web.Response(body=manifest.encode(), content_type="application/msgpack")

    async def bytes(self, request: web.Request) -> web.StreamResponse:
        published, _, buffer = self._find_file(request)
        return await self._send(request, published, buffer)

    def _find_file(self, request: web.Request) -> tuple[Published, ChunkedManifest, Buffer]:
        """The full copy or the delta that the request names, and its manifest."""
        published, base = self._find(request), request.match_info.get("base")
        if base is None:
            return published, published.manifest, published.buffer
        if published.delta is None or published.delta_buffer is None or published.delta.base != base:
            raise web.HTTPNotFound(text=f"version {published.manifest.version} has no delta from this base\n")
        return published, published.delta, published.delta_buffer

    def _find(self, request: web.Request) -> Published:
        if request.match_info["version"] == "base":
            if self.source.base is None:
                raise web.HTTPNotFound(text="no base of adapters is published\n")
            return self.source.base
        version = int(request.match_info["version"])
        if published := self.source.find(version):
            return published
        current = self.source.current
        if current and version < current.version:
            raise web.HTTPGone(text=f"version {version} is withdrawn; current is {current.version}\n")
        raise web.HTTPNotFound(text=f"version {version} is not published; current is {current and current.version}\n")

    async def _send(self, request: web.Request, published: Published, buffer: Buffer) -> web.StreamResponse:
        start, stop = _range(request, buffer.nbytes)
        fd = buffer.dup()
        if fd is None:
            raise web.HTTPGone(text=f"version {published.manifest.version} is withdrawn\n")
        part = "Range" in request.headers
        response = web.StreamResponse(status=206 if part else 200, headers={"Accept-Ranges": "bytes"})
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        if part:
            response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{buffer.nbytes}"
        transport = request.transport

        def may_continue() -> bool:
            return transport is not None and not transport.is_closing() and self.source.is_readable(published)

        try:
            async with asyncio.timeout(self.write_timeout_s):
                await response.prepare(request)
                while transport is not None and transport.get_write_buffer_size():  # the header waits for a full socket
                    await asyncio.sleep(0.01)
            if self.tls or transport is None:
                await self._write(response, fd, start, stop, may_continue)
            else:
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, POLL_US))
                transport.pause_reading()
                # A descriptor of its own, closed when no thread uses it any more: another one could be reused.
                out, file, fd = os.dup(sock.fileno()), fd, -1
                sending = self.threads.submit(_send_file, out, file, start, stop, self.write_timeout_s, may_continue)
                sending.add_done_callback(lambda _: _close(out, file))
                await asyncio.wrap_future(sending)
                transport.resume_reading()
            await response.write_eof()
        except OSError:  # the reader is gone or stalled, or the version is withdrawn; affects only this connection
            _reset(transport)
        finally:
            if fd >= 0:
                os.close(fd)
        return response

    async def _write(
        self, response: web.StreamResponse, fd: int, start: int, stop: int, may_continue: Callable[[], bool]
    ) -> None:
        for at in range(start, stop, TLS_PIECE_BYTES):
            if not may_continue():
                raise ConnectionResetError("withdrawn")
            async with asyncio.timeout(self.write_timeout_s):
                await response.write(os.pread(fd, min(TLS_PIECE_BYTES, stop - at), at))


def _reset(transport: asyncio.Transport | None) -> None:
    """Reset the connection: queued bytes may be mixed with newer ones, and occupy memory."""
    if transport is not None:
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _range(request: web.Request, nbytes: int) -> tuple[int, int]:
    header = request.headers.get("Range")
    if header is None:
        return 0, nbytes
    match = RANGE.fullmatch(header)
    start = int(match[1]) if match else 0
    stop = int(match[2]) + 1 if match and match[2] else nbytes
    if match is None or not start < stop <= nbytes:
        text = f"{header!r} is not a range of {nbytes} bytes\n"
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{nbytes}"}, text=text)
    return start, stop


def _send_file(out: int, file: int, start: int, stop: int, timeout_s: float, may_continue: Callable[[], bool]) -> None:
    """Send bytes `start` to `stop` of a file, with sendfile. Raises OSError if the reader is gone or takes no byte for
    `timeout_s`, or if `may_continue` returned false.

    Meanwhile `out`, the socket, blocks, for at most POLL_US at a time, so that one call sends megabytes: calls that
    return whenever the socket is full would spend more time on the GIL than on sending. The event loop must not read
    from the connection until this returns."""
    os.set_blocking(out, True)
    last_s = time.monotonic()
    while start < stop:
        if not may_continue() or time.monotonic() - last_s > timeout_s:
            raise ConnectionResetError("withdrawn, or the reader has stalled")
        try:
            sent = os.sendfile(out, file, start, min(SEND_BYTES, stop - start))
        except BlockingIOError:
            continue
        if sent == 0:
            raise ConnectionResetError("the file ended early")
        start, last_s = start + sent, time.monotonic()


def _close(out: int, file: int) -> None:
    os.set_blocking(out, False)
    os.close(out)
    os.close(file)
