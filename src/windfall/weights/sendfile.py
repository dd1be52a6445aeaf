"""Sends ranges of a file to sockets from a few threads, so that more than one core can serve.

The kernel moves the bytes (sendfile). A thread serves a reader for as long as the reader keeps up; one that does not
is handed to the event loop, which waits until it can take more. So slow readers, however many, take no thread.

Both descriptors are the sender's own and are closed when no thread uses them any more: a number that was closed under a
thread could by then be another connection's. Meanwhile the connection blocks, for at most PATIENCE_US at a time, so
that one call sends megabytes: calls that return whenever the socket is full cost more in taking turns at the
interpreter than in sending. The event loop must not read from the connection until `send` returns.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PIECE_BYTES = 4 << 20
TURN_BYTES = 64 << 20
"""After so much a reader goes to the back of the queue."""
PATIENCE_US = 5000
"""How long a thread waits for a reader whose buffers are full."""


class Sender:
    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or min(32, 4 * (os.cpu_count() or 1)), thread_name_prefix="weights")

    async def send(
        self, sock: Any, file: int, start: int, stop: int, *, timeout_s: float, go_on: Callable[[], bool]
    ) -> None:
        """Takes over the file. OSError: reader gone, or `go_on` said no; TimeoutError: it stands still."""
        try:
            out, turn = os.dup(sock.fileno()), None
        except OSError:
            os.close(file)
            raise
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, PATIENCE_US))
            os.set_blocking(out, True)
            while start < stop:
                turn = self._pool.submit(_turn, out, file, start, stop, go_on)
                start = await asyncio.wrap_future(turn)
                if start < stop:
                    await _writable(out, timeout_s)
        finally:
            if turn is None:
                _close(out, file)
            else:  # at once, unless this was cancelled in the middle of a turn
                turn.add_done_callback(lambda _: _close(out, file))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _turn(out: int, file: int, at: int, stop: int, go_on: Callable[[], bool]) -> int:
    """Send until the reader falls behind or has had its share; how far it came."""
    stop = min(stop, at + TURN_BYTES)
    while at < stop:
        if not go_on():
            raise ConnectionResetError("withdrawn")
        try:
            sent = os.sendfile(out, file, at, min(PIECE_BYTES, stop - at))
        except BlockingIOError:
            break
        if sent == 0:
            raise ConnectionResetError("the file ended early")
        at += sent
    return at


async def _writable(fd: int, timeout_s: float) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(fd, ready.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ready.wait()
    finally:
        loop.remove_writer(fd)


def _close(out: int, file: int) -> None:
    os.set_blocking(out, False)
    os.close(out)
    os.close(file)
