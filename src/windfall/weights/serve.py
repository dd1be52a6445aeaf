"""Serves the files that this process holds over HTTP. Every request is a GET with `Authorization: Bearer KEY`.

    /weights/{digest}/manifest    the manifest of this file
    /weights/{digest}             its bytes, with `Range: bytes=a-b`

The bytes are answered with 206: those from `a` on that are verified now. These may be fewer than asked for while the
file is being filled; 503: none yet. With `Accept: application/x-windfall-handle` the answer is the BufferHandle, and
which bytes of it are verified, in msgpack: a reader on this machine can read them itself.

401: wrong key. 404: not held. 410: withdrawn. 413: the request has a body. 416: no range, or an invalid one.
weights/publishing/publish.py has a drawing of the whole path. Rules:

- without TLS, the kernel sends from the buffer to the socket, in a thread for every reader, so several cores serve;
- peers that have not sent the key are limited in time and connections (link/listener.py);
- a reader that takes no byte for WRITE_TIMEOUT_S is disconnected; it may reconnect and continue where it was;
- when a file is withdrawn, the connections that still read it are reset before the next piece. The bytes in flight may
  be mixed with newer ones; the hashes of the chunks reveal that.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any

import msgspec
from aiohttp import web

from windfall.errors import WindfallError
from windfall.link import listener
from windfall.weights.buffers import HANDLE_TYPE
from windfall.weights.held_files import HeldFile, HeldFiles, UploadLimit, Withdrawn

READY_WAIT_S = 2.0  # how long a request waits for its first byte
START_S = 30.0  # in which a server must listen
MAX_SENDING = 512  # readers at a time, each with a thread of its own; more of them wait
POLL_US = 250_000  # microseconds that a call waits for a reader whose buffers are full
TLS_PIECE_BYTES = 256 << 10
WRITE_TIMEOUT_S = 30.0
RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")


async def serve(
    files: HeldFiles,
    *,
    host: str,
    port: int,
    key: str,
    ssl: SSLContext | None = None,
    limit: UploadLimit | None = None,
    write_timeout_s: float = WRITE_TIMEOUT_S,
    limits: listener.Listener | None = None,
) -> Server:
    """Start the server; it listens when this returns. Port 0 selects a free port. `limit`: of what it sends."""
    if not key:
        fix = "Pass the key derived from the run's token."
        raise WindfallError("the weight server has no key", where=f"{host}:{port}", fix=fix)
    limits = limits or listener.Listener()
    server = Server(files, key, ssl is not None, limit or UploadLimit(), write_timeout_s, limits)
    app = web.Application(middlewares=[server.admit], client_max_size=1024)
    file = "/weights/{digest:[0-9a-f]{64}}"
    app.router.add_get(f"{file}/manifest", server.manifest)
    app.router.add_get(file, server.bytes)
    options = {"backlog": 1024, "shutdown_timeout": 0.5, "keepalive_timeout": 60.0}
    server.runner, server.port = await limits.serve(app, host, port, ssl, "Choose another port.", **options)
    return server


def serve_in_thread(files: HeldFiles, **options: Any) -> RunningServer:
    """Serve files from a thread with a loop of its own, until it is closed or the process ends. `options`: of
    `serve`."""
    listener.raise_file_limit()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="weight server", daemon=True).start()
    server = asyncio.run_coroutine_threadsafe(serve(files, **options), loop).result(START_S)
    return RunningServer(server, loop)


class RunningServer:
    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.port = server.port
        self._server: Server | None = server
        self._loop = loop

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            asyncio.run_coroutine_threadsafe(server.close(), self._loop).result(START_S)
            self._loop.call_soon_threadsafe(self._loop.stop)


@dataclass(eq=False)
class Server:
    files: HeldFiles
    key: str
    tls: bool
    limit: UploadLimit
    write_timeout_s: float
    listener: listener.Listener
    port: int = 0
    runner: web.AppRunner = field(init=False)

    def __post_init__(self) -> None:
        self.threads = ThreadPoolExecutor(MAX_SENDING, thread_name_prefix="weights")

    async def close(self) -> None:
        self.listener.close()
        await self.runner.cleanup()
        self.threads.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, f"Bearer {self.key}".encode()):
            raise web.HTTPUnauthorized(text="wrong key\n")
        self.listener.authenticated(request.transport)
        if request.can_read_body:
            raise web.HTTPRequestEntityTooLarge(1, request.content_length or 1, text="a request must not have a body\n")
        return await handler(request)

    async def manifest(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._find(request).manifest.encode(), content_type="application/msgpack")

    async def bytes(self, request: web.Request) -> web.StreamResponse:
        file = self._find(request)
        start, stop = _range(request, file.manifest.nbytes)
        try:
            end = file.ready(start, stop)
            if end == start:
                end = await asyncio.wrap_future(self.threads.submit(file.ready, start, stop, READY_WAIT_S))
        except Withdrawn as e:
            raise web.HTTPGone(text=f"{e}\n") from e
        if end == start:
            raise web.HTTPServiceUnavailable(text=f"the bytes from {start} on are not here yet\n")
        if request.headers.get("Accept") == HANDLE_TYPE:
            body = msgspec.msgpack.encode((file.buffer.handle, start, end))
            return web.Response(status=206, body=body, content_type=HANDLE_TYPE)
        return await self._send(request, file, start, end)

    def _find(self, request: web.Request) -> HeldFile:
        file = self.files.find(request.match_info["digest"])
        if file is None:
            raise web.HTTPNotFound(text=f"{request.match_info['digest']} is not held here\n")
        return file

    async def _send(self, request: web.Request, file: HeldFile, start: int, stop: int) -> web.StreamResponse:
        response = web.StreamResponse(status=206)
        response.content_type = "application/octet-stream"
        response.content_length = stop - start
        response.headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.manifest.nbytes}"
        transport = request.transport

        def may_continue() -> bool:
            return transport is not None and not transport.is_closing() and not file.revoked

        try:
            async with asyncio.timeout(self.write_timeout_s):
                await response.prepare(request)
                while transport is not None and transport.get_write_buffer_size():  # the header waits for a full socket
                    await asyncio.sleep(0.01)
            if self.tls or transport is None:
                await self._write(response, file, start, stop, may_continue)
            else:
                sock = transport.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, POLL_US))
                transport.pause_reading()
                out = os.dup(sock.fileno())  # closed when no thread uses it any more: the transport's could be reused
                sending = self.threads.submit(self._send_file, out, file, start, stop, may_continue)
                sending.add_done_callback(lambda _: _close(out))
                await asyncio.wrap_future(sending)
                transport.resume_reading()
            await response.write_eof()
        except OSError:  # the reader is gone or stalled, or the file is withdrawn; affects only this connection
            _reset(transport)
        return response

    async def _write(
        self, response: web.StreamResponse, file: HeldFile, start: int, stop: int, may_continue: Callable[[], bool]
    ) -> None:
        with file.reading() as fd:
            piece = min(TLS_PIECE_BYTES, self.limit.piece_bytes)
            for at in range(start, stop, piece):
                if not may_continue():
                    raise ConnectionResetError("withdrawn")
                data = os.pread(fd, min(piece, stop - at), at)
                await asyncio.to_thread(self.limit.take, len(data))
                async with asyncio.timeout(self.write_timeout_s):
                    await response.write(data)

    def _send_file(self, out: int, file: HeldFile, start: int, stop: int, may_continue: Callable[[], bool]) -> None:
        """Send bytes `start` to `stop` with sendfile. Raises OSError if the reader is gone or takes no byte for
        `write_timeout_s`, or if `may_continue` returned false.

        Meanwhile `out`, the socket, blocks, for at most POLL_US at a time, so that one call sends megabytes: calls that
        return whenever the socket is full would spend more time on the GIL than on sending. The event loop must not
        read from the connection until this returns."""
        os.set_blocking(out, True)
        with file.reading() as fd:
            taken, last_s = start, time.monotonic()
            while start < stop:
                if start == taken:
                    taken = min(stop, start + self.limit.piece_bytes)
                    self.limit.take(taken - start)
                    last_s = time.monotonic()
                if not may_continue() or time.monotonic() - last_s > self.write_timeout_s:
                    raise ConnectionResetError("withdrawn, or the reader has stalled")
                try:
                    sent = os.sendfile(out, fd, start, taken - start)
                except BlockingIOError:
                    continue
                if sent == 0:
                    raise ConnectionResetError("the file ended early")
                start, last_s = start + sent, time.monotonic()


def _reset(transport: asyncio.Transport | None) -> None:
    """Reset the connection: queued bytes may be mixed with newer ones, and occupy memory."""
    if transport is not None:
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()


def _range(request: web.Request, nbytes: int) -> tuple[int, int]:
    header = request.headers.get("Range", "")
    match = RANGE.fullmatch(header)
    start = int(match[1]) if match else 0
    stop = int(match[2]) + 1 if match and match[2] else nbytes
    if match is None or not start < stop <= nbytes:
        text = f"{header!r} is not a range of {nbytes} bytes\n"
        raise web.HTTPRequestRangeNotSatisfiable(headers={"Content-Range": f"bytes */{nbytes}"}, text=text)
    return start, stop


def _close(out: int) -> None:
    os.set_blocking(out, False)
    os.close(out)
