"""A listening port that limits peers until they have authenticated. An unauthenticated peer has limited

- time: its connection is closed AUTH_TIMEOUT_S after it was opened, no matter what the peer has sent (a TLS handshake
  may take the same time in addition);
- connections: at most `max_unauthenticated` are open. When the limit is reached, a new connection replaces the oldest
  one from the address with the most connections, so that one machine cannot keep other peers out;
- bytes: `limit_bytes` sets the total of all frames.

An authenticated peer is passed on to the server behind the port, without further overhead. What anyone can cause is
logged at most once per LOG_INTERVAL_S: a request that is not HTTP, and a connection for which the process has no file
descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import ssl as tls
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from windfall.errors import WindfallError
from windfall.link.base import clip

AUTH_TIMEOUT_S = 20.0
MAX_UNAUTHENTICATED = 256
REQUEST_BYTES = 8 << 10  # approximate size of an HTTP request with all its headers
LOG_INTERVAL_S = 60.0
MAX_FILES = 1 << 20

log = logging.getLogger(__name__)
Answer = Callable[[int, str], web.Response]
"""Makes an answer to a request that is not HTTP, from a status and a reason."""


def plain_answer(status: int, why: str) -> web.Response:
    return web.Response(status=status, text=f"{why}\n")


class Listener:
    def __init__(
        self, *, max_unauthenticated: int = MAX_UNAUTHENTICATED, auth_timeout_s: float = AUTH_TIMEOUT_S
    ) -> None:
        self.max_unauthenticated, self._auth_timeout_s = max_unauthenticated, auth_timeout_s
        self._peers: dict[asyncio.BaseTransport, _UnauthenticatedPeer] = {}  # oldest connection first
        self._server: asyncio.Server | None = None

    async def serve(
        self,
        app: web.Application,
        host: str,
        port: int,
        ssl: tls.SSLContext | None,
        fix: str,
        backlog: int = 128,
        answer: Answer = plain_answer,
        **options: Any,
    ) -> tuple[web.AppRunner, int]:
        """Serve `app` with a runner of these `options`. Returns runner and port, or raises WindfallError with `fix`.
        What is not HTTP gets an `answer`. Bodies are not decompressed: a handler that reads one does that."""
        own = {"access_log": None, "logger": log, "lingering_time": 0.0, "auto_decompress": False}
        runner = web.AppRunner(app, **(own | options))
        await runner.setup()
        server: Any = runner.server
        handler_class = _request_handler(answer)

        def connect() -> _UnauthenticatedPeer:
            handler = server()
            handler.__class__ = handler_class  # aiohttp has no other way to say how such requests are answered
            return _UnauthenticatedPeer(self, handler)

        loop = asyncio.get_running_loop()
        _limit_descriptor_errors(loop)
        try:
            self._server = await loop.create_server(
                connect,
                host,
                port,
                ssl=ssl,
                backlog=backlog,
                reuse_address=True,
                ssl_handshake_timeout=self._auth_timeout_s if ssl else None,
            )
        except OSError as e:
            await runner.cleanup()
            raise WindfallError(f"cannot listen: {e.strerror or e}", where=f"{host}:{port}", fix=fix) from e
        return runner, self._server.sockets[0].getsockname()[1]

    def authenticated(self, transport: asyncio.BaseTransport | None) -> None:
        """Lift the limits of this peer. Has no effect if they were lifted before, or if the peer is gone."""
        peer = self._peers.pop(transport, None) if transport else None
        if peer is not None:
            peer.timeout.cancel()
            peer.transport.set_protocol(peer.inner)

    def limit_bytes(
        self, transport: asyncio.BaseTransport | None, max_bytes: int, exceeded: Callable[[], object]
    ) -> None:
        """Call `exceeded` if this peer sends more than `max_bytes` after its request before it is authenticated."""
        peer = self._peers.get(transport) if transport else None
        if peer is not None:
            peer.max_bytes, peer.exceeded = REQUEST_BYTES + max_bytes, exceeded
            if peer.received_bytes > peer.max_bytes:  # they arrived together with the request
                exceeded()

    def close(self) -> None:
        """Accept no more connections. Open connections belong to the server behind the port."""
        if self._server is not None:
            self._server.close()

    def add(self, peer: _UnauthenticatedPeer) -> asyncio.TimerHandle:
        if len(self._peers) >= self.max_unauthenticated:
            busiest = Counter(p.address for p in self._peers.values()).most_common(1)[0][0]
            oldest = next(t for t, p in self._peers.items() if p.address == busiest)
            self._peers.pop(oldest).transport.abort()
        self._peers[peer.transport] = peer
        return asyncio.get_running_loop().call_later(self._auth_timeout_s, peer.transport.abort)

    def remove(self, peer: _UnauthenticatedPeer) -> None:
        self._peers.pop(peer.transport, None)


class _UnauthenticatedPeer(asyncio.Protocol):
    """Forwards everything to the inner protocol, and counts the bytes received."""

    transport: asyncio.Transport
    timeout: asyncio.TimerHandle

    def __init__(self, listener: Listener, inner: Any) -> None:
        self.inner, self._listener = inner, listener
        self.received_bytes, self.max_bytes = 0, 1 << 62
        self.exceeded: Callable[[], object] = lambda: None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else "?"
        self.inner.connection_made(transport)
        self.timeout = self._listener.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timeout.cancel()
        self._listener.remove(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.received_bytes += len(data)
        if self.received_bytes > self.max_bytes:
            self.exceeded()
        else:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()


def _request_handler(answer: Answer) -> type[web.RequestHandler]:
    """Like aiohttp's, but what is not HTTP costs no traceback in the log: a peer could fill the disk with them."""
    logged_s, left_out = -LOG_INTERVAL_S, 0

    class RequestHandler(web.RequestHandler):
        __slots__ = ()

        def handle_error(
            self,
            request: web.BaseRequest,
            status: int = 500,
            exc: BaseException | None = None,
            message: str | None = None,
        ) -> web.StreamResponse:
            nonlocal logged_s, left_out
            if not isinstance(exc, HttpProcessingError):
                return super().handle_error(request, status, exc, message)
            why = clip(" ".join(exc.message[:1000].split()))  # aiohttp quotes all that it has received
            if time.monotonic() - logged_s >= LOG_INTERVAL_S:
                more = f"; {left_out} more since the last such line" if left_out else ""
                log.warning("refused a request from %s: %s%s", request.remote, why, more)
                logged_s, left_out = time.monotonic(), 0
            else:
                left_out += 1
            response = answer(status, why)
            response.force_close()
            return response

    return RequestHandler


def is_same_machine(peer: Any, own: Any) -> bool:
    """Whether a connection comes from this machine, by its peer address and its own address.

    >>> is_same_machine(("127.0.0.1", 5), ("127.0.0.1", 80)), is_same_machine(("::ffff:127.0.0.1", 5), ("::", 80))
    (True, True)
    >>> is_same_machine(("10.0.0.5", 5), ("10.0.0.5", 80)), is_same_machine(("10.0.0.6", 5), ("10.0.0.5", 80))
    (True, False)
    >>> is_same_machine(None, None)
    False
    """
    if not peer or not own:
        return False
    if peer[0] == own[0]:  # the trainer connects to the address on which the run listens, which need not be loopback
        return True
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def raise_file_limit() -> int:
    """Raise the limit on open files as far as allowed, and return it: every connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # the limit stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _limit_descriptor_errors(loop: asyncio.AbstractEventLoop) -> None:
    """asyncio reports each connection that it has no descriptor for, hundreds of times per second. Log only some."""
    previous, logged_s = loop.get_exception_handler(), -LOG_INTERVAL_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_s
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            if time.monotonic() - logged_s >= LOG_INTERVAL_S:
                logged_s = time.monotonic()
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                fix = f"This process may open {limit} files; raise the limit with ulimit -n"
                log.error("%s: connections wait. %s", error.strerror, fix)
        elif isinstance(error, ValueError) and "._start_serving(" in context.get("message", ""):
            pass  # asyncio retries, hundreds of times, after the port was closed
        elif previous is not None:
            previous(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
