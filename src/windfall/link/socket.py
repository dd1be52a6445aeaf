"""A link over a WebSocket, and the one port of a controller that workers and the trainer dial.

Frames are bounded; one that is no message closes the link with the reason, and hurts nobody else. Until a link's
other end has proved itself, all it may send is a few bytes; for the rest see listening.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import ssl as tls
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from aiohttp import WebSocketError, WSMsgType, web

from windfall.errors import WindfallError
from windfall.link import listener
from windfall.link.base import BadFrame, LinkClosed, TooLarge, clip
from windfall.link.messages import MAX_FRAME_BYTES, encode

Attend = Callable[["SocketLink"], Awaitable[None]]
STRANGER_BYTES = 64 << 10


class SocketLink:
    def __init__(
        self,
        socket: Any,
        receives: Any,
        peer: str,
        drop: Callable[[], object] = lambda: None,
        *,
        most: int = MAX_FRAME_BYTES,
        proved: Callable[[], object] = lambda: None,
    ) -> None:
        """`most`: of a frame, in bytes, in either direction. `proved`: to be called once the other end has."""
        self.peer, self.most, self.proved = peer, most, proved
        self._socket, self._drop = socket, drop
        self._decode = msgspec.msgpack.Decoder(receives).decode
        self._over: asyncio.Future[Any] | None = None

    def over(self) -> None:
        """The other end has sent more than a stranger may."""
        if self._over is None:
            self._over = asyncio.ensure_future(self._socket.close(code=1009, message=b"prove yourself first"))

    async def send(self, message: object) -> None:
        frame = encode(message)
        if len(frame) >= self.most:
            what = f"a {type(message).__name__} of {len(frame):,} bytes"
            raise TooLarge(f"{self.peer}: {what}, and a frame has less than {self.most:,}")
        try:
            await self._socket.send_bytes(frame)
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
                said = f"not a message: {clip(e)}"  # it may quote what was sent
                await self.close(said)
                raise BadFrame(f"{self.peer}: {said}") from e
        if self._over is not None:
            await asyncio.wait([self._over], timeout=1.0)
            raise BadFrame(f"{self.peer}: too many bytes before it has proved itself")
        if frame.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED):
            # A close in order says why; without a word the process died, or its machine, or the network between.
            said = f"closed: {frame.extra}" if frame.extra else "closed" if frame.data == 1000 else "connection lost"
            raise LinkClosed(f"{self.peer}: {clip(said)}")
        if frame.type is WSMsgType.ERROR:
            kind = BadFrame if isinstance(frame.data, WebSocketError) else LinkClosed
            raise kind(f"{self.peer}: {clip(frame.data)}")
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
    stranger_bytes: int = STRANGER_BYTES
    """All that one may send who has not proved himself."""
    here_only: bool = False
    """Only for those who dial from this very machine."""


class Port:
    """The listening side: who attends to those that dial which path."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: dict[str, Route],
        ssl: tls.SSLContext | None,
        door: listener.Door | None = None,
    ) -> None:
        self.host, self.port = host, port
        self._routes, self._ssl, self._door = routes, ssl, door or listener.Door()
        self._links: set[SocketLink] = set()
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application(client_max_size=1024)
        for path in self._routes:
            app.router.add_get(path, self._accept)
        self._runner = web.AppRunner(
            app, access_log=None, logger=listener.log, shutdown_timeout=1.0, handle_signals=False, lingering_time=0.0
        )
        await self._runner.setup()
        assert self._runner.server is not None, "set up"
        try:
            self.port = await self._door.listen(self._runner.server, self.host, self.port, self._ssl)
        except OSError as e:
            await self._runner.cleanup()
            raise WindfallError(
                f"cannot listen: {e.strerror or e}", where=f"{self.host}:{self.port}",
                fix="Set fleet.host and fleet.port, or stop what uses the port.",
            ) from e  # fmt: skip

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        route = self._routes[request.path]
        socket = web.WebSocketResponse(
            max_msg_size=route.most_bytes, compress=False, timeout=1.0, heartbeat=route.heartbeat_s
        )
        if not socket.can_prepare(request):
            return web.Response(status=426, text="windfall speaks WebSocket here: windfall worker --join URL\n")
        transport = request.transport
        if route.here_only and not (transport and _is_here(transport)):
            return web.Response(status=403, text="only for processes of this machine\n")
        await socket.prepare(request)
        drop = transport.abort if transport else lambda: None
        link = SocketLink(
            socket, route.receives, request.remote or "?", drop, most=route.most_bytes,
            proved=lambda: self._door.proved(transport),
        )  # fmt: skip
        self._door.bound(transport, route.stranger_bytes, link.over)
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
        self._door.close()
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
        return SocketLink(socket, self._receives, self.url, lambda: _cut(raw), most=self._most)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _is_here(transport: asyncio.BaseTransport) -> bool:
    return listener.is_here(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))


def _cut(raw: Any) -> None:
    """However much is unsent: whoever waits to send it learns that it never will be."""
    with contextlib.suppress(OSError):
        raw.shutdown(sockets.SHUT_RDWR)
