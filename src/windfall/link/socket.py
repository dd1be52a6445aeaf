"""A link over a WebSocket, and the one port of a controller that workers and the trainer dial.

Frames are bounded; one that is no message closes the link with the reason, and hurts nobody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket as sockets
import ssl as tls
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import WebSocketError, WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError

from windfall.errors import WindfallError
from windfall.link.base import BadFrame, LinkClosed
from windfall.link.messages import MAX_FRAME_BYTES, encode

Attend = Callable[["SocketLink"], Awaitable[None]]
_log = logging.getLogger(__name__)
# Whoever speaks no HTTP is answered with 400; a traceback for each would let a stranger fill the disk.
_log.addFilter(lambda said: not (said.exc_info and isinstance(said.exc_info[1], HttpProcessingError)))


class SocketLink:
    def __init__(self, socket: Any, receives: Any, peer: str, drop: Callable[[], object] = lambda: None) -> None:
        self.peer = peer
        self._socket, self._drop = socket, drop
        self._decode = msgspec.msgpack.Decoder(receives).decode

    async def send(self, message: object) -> None:
        try:
            await self._socket.send_bytes(encode(message))
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as e:
            raise LinkClosed(f"{self.peer}: {e or type(e).__name__}") from e
        except asyncio.CancelledError:
            # All who wait for room share one future in aiohttp: a close that is given up cancels it under a sender.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise LinkClosed(f"{self.peer}: closed while sending") from None

    async def receive(self) -> object:
        frame = await self._socket.receive()
        if frame.type is WSMsgType.BINARY:
            try:
                return self._decode(frame.data)
            except (ValueError, RecursionError) as e:  # also text that is none, and nesting without end
                await self.close(f"not a message: {e}")
                raise BadFrame(f"{self.peer}: not a message: {e}") from e
        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            # A close in order says why; without a word the process died, or its machine, or the network between.
            said = f"closed: {frame.extra}" if frame.extra else "closed" if frame.data == 1000 else "connection lost"
            raise LinkClosed(f"{self.peer}: {said}")
        if frame.type is WSMsgType.ERROR:
            kind = BadFrame if isinstance(frame.data, WebSocketError) else LinkClosed
            raise kind(f"{self.peer}: {frame.data}")
        await self.close("only binary frames are messages")
        raise BadFrame(f"{self.peer}: a {frame.type.name} frame")

    async def close(self, why: str = "") -> None:
        # A closing handshake with somebody who is frozen would wait; nobody here needs its answer.
        try:
            async with asyncio.timeout(1.0):
                await self._socket.close(message=why.encode()[:120].decode(errors="ignore").encode())
        except (TimeoutError, ConnectionError, RuntimeError):
            pass
        self._drop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    receives: Any
    """The type of what comes in."""
    most_bytes: int
    """Of one frame."""
    attend: Attend
    heartbeat_s: float | None = None
    """Ping as often, and give up whoever does not answer. None: those who dial say themselves that they live."""


class Port:
    """The listening side: who attends to those that dial which path."""

    def __init__(self, host: str, port: int, routes: dict[str, Route], ssl: tls.SSLContext | None) -> None:
        self.host, self.port = host, port
        self._routes, self._ssl = routes, ssl
        self._links: set[SocketLink] = set()
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=1024)
        for path in self._routes:
            app.router.add_get(path, self._accept)
        self._runner = web.AppRunner(app, access_log=None, logger=_log, shutdown_timeout=1.0, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self._ssl, reuse_address=True)
        try:
            await site.start()
        except OSError as e:
            raise WindfallError(
                f"cannot listen: {e.strerror or e}", where=f"{self.host}:{self.port}",
                fix="Set fleet.host and fleet.port, or stop what uses the port.",
            ) from e  # fmt: skip
        self.port = self._runner.addresses[0][1]

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        route = self._routes[request.path]
        socket = web.WebSocketResponse(
            max_msg_size=route.most_bytes, compress=False, timeout=1.0, heartbeat=route.heartbeat_s
        )
        if not socket.can_prepare(request):
            return web.Response(status=426, text="windfall speaks WebSocket here: windfall worker --join URL\n")
        await socket.prepare(request)
        transport = request.transport
        drop = transport.abort if transport else lambda: None
        link = SocketLink(socket, route.receives, request.remote or "?", drop)
        self._links.add(link)
        try:
            await route.attend(link)
        except LinkClosed:
            pass
        finally:
            self._links.discard(link)
            await link.close()
        return socket

    async def close(self, why: str = "the run ends") -> None:
        await asyncio.gather(*(link.close(why) for link in list(self._links)))
        if self._runner is not None:
            await self._runner.cleanup()


class Dialler:
    """The dialling side. One session for all attempts; `close` at the end."""

    def __init__(self, url: str, path: str, receives: Any, *, ssl: tls.SSLContext | None, most: int = MAX_FRAME_BYTES):
        self.url = url.rstrip("/")
        self._path, self._receives, self._ssl, self._most = path, receives, ssl, most
        self._session: aiohttp.ClientSession | None = None

    async def dial(self, timeout_s: float = 10.0) -> SocketLink:
        """Raises LinkClosed when nobody answers in time, or not as a controller does."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                socket = await self._session.ws_connect(
                    self.url + self._path, max_msg_size=self._most, ssl=self._ssl or True, heartbeat=10.0, compress=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0)  # pyright: ignore[reportCallIssue],
                )  # fmt: skip
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            said = f"no answer in {timeout_s:g} s" if isinstance(e, TimeoutError) else str(e) or type(e).__name__
            raise LinkClosed(f"{self.url}: {said}") from e
        raw = socket.get_extra_info("socket")
        return SocketLink(socket, self._receives, self.url, lambda: _cut(raw))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _cut(raw: Any) -> None:
    """However much is unsent: whoever waits to send it learns that it never will be."""
    with contextlib.suppress(OSError):
        raw.shutdown(sockets.SHUT_RDWR)
