"""A port that strangers can reach. Until somebody has shown who he is, he is short of everything:

- time: PROVE_S after he came he is cut off, whatever he has sent so far (with TLS, so long again for its handshake);
- places: there are `most` of them. Whoever comes when all are taken gets the place of the one who has waited longest
  among those of the busiest address, so that a crowd from one machine keeps nobody else out;
- bytes: as many as `bound` says, all frames together.

Who has proved himself is passed on to what stands behind the port, and costs nothing more. A process that is out of
file descriptors says so now and then, not for each connection that it cannot take.
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

from aiohttp.http_exceptions import HttpProcessingError

PROVE_S = 20.0
STRANGERS = 256
HEAD_BYTES = 8 << 10
"""Of a request with all its headers, about."""
SAID_EVERY_S = 60.0
FILES = 1 << 20

log = logging.getLogger(__name__)
# Whoever speaks no HTTP is answered with 400; a traceback for each would let a stranger fill the disk.
log.addFilter(lambda said: not (said.exc_info and isinstance(said.exc_info[1], HttpProcessingError)))


class Door:
    def __init__(self, *, most: int = STRANGERS, prove_s: float = PROVE_S) -> None:
        self.most, self._prove_s = most, prove_s
        self._strangers: dict[asyncio.BaseTransport, _Stranger] = {}
        """In the order in which they came."""
        self._server: asyncio.Server | None = None

    async def listen(
        self, inner: Callable[[], Any], host: str, port: int, ssl: tls.SSLContext | None, backlog: int = 128
    ) -> int:
        """`inner` makes what attends to one connection, like a web.Server. OSError where the port is not to be had."""
        loop = asyncio.get_running_loop()
        _say_rarely(loop)
        self._server = await loop.create_server(
            lambda: _Stranger(self, inner()), host, port, ssl=ssl, backlog=backlog, reuse_address=True,
            ssl_handshake_timeout=self._prove_s if ssl else None,
        )  # fmt: skip
        return self._server.sockets[0].getsockname()[1]

    def proved(self, transport: asyncio.BaseTransport | None) -> None:
        """This one is known now. Does no harm when it was before, or is gone."""
        stranger = self._strangers.pop(transport, None) if transport else None
        if stranger is not None:
            stranger.done()
            stranger.transport.set_protocol(stranger.inner)

    def bound(self, transport: asyncio.BaseTransport | None, most_bytes: int, over: Callable[[], object]) -> None:
        """Until this one is known, so many bytes after its request. What is more goes nowhere, and `over` is called."""
        stranger = self._strangers.get(transport) if transport else None
        if stranger is not None:
            stranger.most_bytes, stranger.over = HEAD_BYTES + most_bytes, over
            if stranger.came_bytes > stranger.most_bytes:  # right behind the request
                over()

    def close(self) -> None:
        """Nobody else comes in. Those who are in are the business of what stands behind."""
        if self._server is not None:
            self._server.close()

    def came(self, stranger: _Stranger) -> Callable[[], None]:
        if len(self._strangers) >= self.most:
            crowd = Counter(s.address for s in self._strangers.values()).most_common(1)[0][0]
            first = next(t for t, s in self._strangers.items() if s.address == crowd)
            self._strangers.pop(first).cut()
        self._strangers[stranger.transport] = stranger
        return asyncio.get_running_loop().call_later(self._prove_s, stranger.cut).cancel

    def left(self, stranger: _Stranger) -> None:
        self._strangers.pop(stranger.transport, None)


class _Stranger(asyncio.Protocol):
    """Passes everything on, and keeps count."""

    transport: asyncio.Transport

    def __init__(self, door: Door, inner: Any) -> None:
        self.inner, self._door = inner, door
        self.address = "?"
        self.came_bytes, self.most_bytes = 0, 1 << 62
        self.over: Callable[[], object] = lambda: None
        self.done: Callable[[], None] = lambda: None
        """Stops the clock."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = peer[0] if peer else "?"
        self.inner.connection_made(transport)
        self.done = self._door.came(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.done()
        self._door.left(self)
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.came_bytes += len(data)
        if self.came_bytes > self.most_bytes:
            self.over()
        else:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def cut(self) -> None:
        self.transport.abort()


def is_here(peer: Any, own: Any) -> bool:
    """Of a connection's two addresses: does it come from this very machine?

    >>> is_here(("127.0.0.1", 5), ("127.0.0.1", 80)), is_here(("::ffff:127.0.0.1", 5), ("::", 80))
    (True, True)
    >>> is_here(("10.0.0.5", 5), ("10.0.0.5", 80)), is_here(("10.0.0.6", 5), ("10.0.0.5", 80)), is_here(None, None)
    (True, False, False)
    """
    if not peer or not own:
        return False
    if peer[0] == own[0]:  # a run that listens on one address of this machine is dialled there by its trainer, too
        return True
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def raise_file_limit() -> int:
    """Every connection takes a file descriptor: allow this process all that it may have. How many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    with contextlib.suppress(OSError, ValueError):  # then it stays as it was
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _say_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """asyncio tells of every connection that it has no descriptor for, hundreds of times per second."""
    before, said_s = loop.get_exception_handler(), -SAID_EVERY_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said_s
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            if time.monotonic() - said_s >= SAID_EVERY_S:
                said_s = time.monotonic()
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                log.error("%s: connections wait. This process may have %d files open: ulimit -n", error.strerror, limit)
        elif isinstance(error, ValueError) and "._start_serving(" in context.get("message", ""):
            pass  # it wanted to try again, hundreds of times, and the port was closed meanwhile
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
