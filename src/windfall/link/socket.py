"""A link over a WebSocket, and the controller's only port, to which workers and the trainer connect.

Frames have a size limit. A frame that is not a valid message closes its own link, with the reason, and no other. An
unauthenticated peer may send only a few bytes; link/listener.py has its other limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket as sockets
import ssl as tls
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import WebSocketError, WSMsgType, web

from windfall.link import listener
from windfall.link.base import BadFrame, FrameTooLarge, LinkClosed, clip
from windfall.link.messages import MAX_FRAME_BYTES, decoder, encode

Handler = Callable[["SocketLink"], Awaitable[None]]
UNAUTHENTICATED_BYTES = 64 << 10  # bytes accepted from a peer before it has authenticated, all frames together


class SocketLink:
    def __init__(
        self,
        socket: Any,
        receives: Any,
        peer: str,
        drop: Callable[[], object] = lambda: None,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        authenticated: Callable[[], None] = lambda: None,
    ) -> None:
        """`receives`: the union of the messages that may arrive; `drop` closes the connection without a handshake;
        `max_frame_bytes` limits frames in both directions; `authenticated` lifts the limits of a new peer."""
        self.peer = peer
        self.max_frame_bytes = max_frame_bytes
        self.authenticated = authenticated
        self._socket, self._drop = socket, drop
        self._decode = decoder(receives)
        self._limit_closing: asyncio.Future[Any] | None = None  # closes the link, once the byte limit is exceeded

    def limit_exceeded(self) -> None:
        """Close the link: the peer has sent more than an unauthenticated peer may."""
        if self._limit_closing is None:
            self._limit_closing = asyncio.ensure_future(self._socket.close(code=1009, message=b"authenticate first"))

    async def send(self, message: object) -> None:
        frame = encode(message)
        if len(frame) >= self.max_frame_bytes:
            what = f"a {type(message).__name__} of {len(frame):,} bytes"
            raise FrameTooLarge(f"{self.peer}: {what}; a frame must have less than {self.max_frame_bytes:,}")
        try:
            await self._socket.send_bytes(frame)
        except (ConnectionError, RuntimeError, aiohttp.ClientError) as e:
            raise LinkClosed(f"{self.peer}: {e or type(e).__name__}") from e
        except asyncio.CancelledError:
            # In aiohttp, all senders that wait for room share one future. A close that times out cancels it for all.
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            raise LinkClosed(f"{self.peer}: closed while sending") from None

    async def receive(self) -> object:
        frame = await self._socket.receive()
        if frame.type is WSMsgType.BINARY:
            try:
                return self._decode(frame.data)
            except (ValueError, RecursionError) as e:  # also invalid UTF-8, and endless nesting
                why = f"not a message: {clip(e)}"  # the error may quote the frame
                await self.close(why)
                raise BadFrame(f"{self.peer}: {why}") from e
        if self._limit_closing is not None:
            await asyncio.wait([self._limit_closing], timeout=1.0)
            raise BadFrame(f"{self.peer}: too many bytes before authentication")
        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            # A regular close has a reason or code 1000. Otherwise the process, its machine or the network has failed.
            why = f"closed: {frame.extra}" if frame.extra else "closed" if frame.data == 1000 else "connection lost"
            raise LinkClosed(f"{self.peer}: {clip(why)}")
        if frame.type is WSMsgType.ERROR:
            kind = BadFrame if isinstance(frame.data, WebSocketError) else LinkClosed
            raise kind(f"{self.peer}: {clip(frame.data)}")
        await self.close("only binary frames are accepted")
        raise BadFrame(f"{self.peer}: received a {frame.type.name} frame, expected a binary one")

    async def close(self, why: str = "") -> None:
        # A closing handshake with a frozen peer would wait forever, and its answer is not needed.
        with contextlib.suppress(TimeoutError, ConnectionError, RuntimeError):
            async with asyncio.timeout(1.0):
                await self._socket.close(message=why.encode()[:120].decode(errors="ignore").encode())
        self._drop()


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    receives: Any  # union of the messages that may arrive
    max_frame_bytes: int
    handler: Handler  # serves one link; the link is closed when it returns
    heartbeat_s: float | None = None  # seconds between pings that a peer must answer; None: peers send heartbeats
    unauthenticated_bytes: int = UNAUTHENTICATED_BYTES
    same_machine_only: bool = False  # accept only connections from this machine


class Port:
    """The listening side: one route for each path."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: dict[str, Route],
        ssl: tls.SSLContext | None,
        limits: listener.Listener | None = None,
        fix: str = "Set fleet.host and fleet.port, or stop the process that uses the port.",
        pages: Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] | None = None,
    ) -> None:
        """`fix`: what to do if the port cannot be opened. `pages`: handlers of plain HTTP requests, by path; they call
        `welcome` once a request has authenticated."""
        self._pages = pages or {}
        self.host = host
        self.port = port
        self._fix = fix
        self._routes = routes
        self._ssl = ssl
        self._listener = limits or listener.Listener()
        self._links: set[SocketLink] = set()
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=1024)
        for path in self._routes:
            app.router.add_get(path, self._accept)
        for path, handler in self._pages.items():
            app.router.add_get(path, handler)
        options = {"shutdown_timeout": 1.0, "handle_signals": False}
        self._runner, self.port = await self._listener.serve(app, self.host, self.port, self._ssl, self._fix, **options)

    def welcome(self, request: web.Request) -> None:
        """Lift the limits of a peer whose plain HTTP request has authenticated."""
        self._listener.authenticated(request.transport)

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        route = self._routes[request.path]
        socket = web.WebSocketResponse(
            max_msg_size=route.max_frame_bytes, compress=False, timeout=1.0, heartbeat=route.heartbeat_s
        )
        if not socket.can_prepare(request):
            return web.Response(status=426, text="this port accepts only WebSockets: windfall worker --join URL\n")
        transport = request.transport
        ends = (request.get_extra_info("peername"), request.get_extra_info("sockname"))
        if route.same_machine_only and not listener.is_same_machine(*ends):
            return web.Response(status=403, text="this path accepts only processes on this machine\n")
        await socket.prepare(request)
        drop = transport.abort if transport else lambda: None
        link = SocketLink(
            socket,
            route.receives,
            request.remote or "?",
            drop,
            max_frame_bytes=route.max_frame_bytes,
            authenticated=lambda: self._listener.authenticated(transport),
        )
        self._listener.limit_bytes(transport, route.unauthenticated_bytes, link.limit_exceeded)
        self._links.add(link)
        try:
            with contextlib.suppress(LinkClosed):
                await route.handler(link)
        finally:
            self._links.discard(link)
            await link.close()
        return socket

    async def close(self, why: str = "the run ends") -> None:
        self._listener.close()
        await asyncio.gather(*(link.close(why) for link in list(self._links)))
        if self._runner is not None:
            await self._runner.cleanup()


class Dialer:
    """The dialing side. All attempts share one HTTP session; call `close` at the end."""

    def __init__(
        self, url: str, path: str, receives: Any, *, ssl: tls.SSLContext | None, max_frame_bytes: int = MAX_FRAME_BYTES
    ):
        self.url = url.rstrip("/")
        self._path = path
        self._receives = receives
        self._ssl = ssl
        self._max_frame_bytes = max_frame_bytes
        self._session: aiohttp.ClientSession | None = None

    async def dial(self, timeout_s: float = 10.0) -> SocketLink:
        """Raises LinkClosed if no controller answers in time."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(sock_connect=timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                socket = await self._session.ws_connect(
                    self.url + self._path,
                    max_msg_size=self._max_frame_bytes,
                    ssl=self._ssl or True,
                    heartbeat=10.0,
                    compress=0,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),  # pyright: ignore[reportCallIssue],
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise LinkClosed(f"{self.url}: {_why_no_link(e, timeout_s)}") from e
        raw = socket.get_extra_info("socket")
        return SocketLink(
            socket, self._receives, self.url, lambda: _shut_down(raw), max_frame_bytes=self._max_frame_bytes
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _why_no_link(error: Exception, timeout_s: float) -> str:
    """Why a controller cannot be reached, and what to do if TLS is the reason."""
    match error:
        case TimeoutError():
            return f"no answer in {timeout_s:g} s"
        case aiohttp.ClientConnectorCertificateError():
            why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            return f"the certificate is not accepted: {why}. Set --tls-ca to the certificate to trust"
        case aiohttp.ClientSSLError():
            return f"no TLS: {error.os_error}. If the run has no TLS, its address begins with http://"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError() | aiohttp.ClientOSError(errno=errno.ECONNRESET):
            return "closed without an answer. If the run has TLS, its address begins with https://"
        case aiohttp.ClientConnectorError():  # its own text speaks of ssl, also without TLS
            return f"no connection: {error.os_error.strerror or error.os_error}"
        case _:
            return str(error) or type(error).__name__


def _shut_down(raw: Any) -> None:
    """Close the connection even if there is unsent data, so that waiting senders get an error."""
    with contextlib.suppress(OSError):
        raw.shutdown(sockets.SHUT_RDWR)
