"""Sends ranges of a file to sockets with sendfile, from a few threads, so that several cores can serve.

A thread serves a reader as long as the reader keeps up. A reader that falls behind is handed to the event loop, which
waits until its socket is writable. Any number of slow readers therefore occupies no thread.

Both descriptors belong to the sender and are closed when no thread uses them any more: a descriptor that is closed
while a thread uses it could be reused by another connection. Meanwhile the socket blocks, for at most SEND_TIMEOUT_US
at a time, so that one call sends megabytes: calls that return whenever the socket is full would spend more time on the
GIL than on sending. The event loop must not read from the connection until `send` returns.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SEND_BYTES = 4 << 20
TURN_BYTES = 64 << 20  # bytes after which a reader goes to the back of the queue
SEND_TIMEOUT_US = 5000  # microseconds that a thread waits for a reader whose buffers are full


class Sender:
    def __init__(self, threads: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads or min(32, 4 * (os.cpu_count() or 1)), thread_name_prefix="weights")

    async def send(
        self, sock: Any, file: int, start: int, stop: int, *, timeout_s: float, may_continue: Callable[[], bool]
    ) -> None:
        """Send bytes `start` to `stop`, and close `file`. Raises OSError if the reader is gone or `may_continue`
        returned false, and TimeoutError if the reader takes no byte for `timeout_s`."""
        try:
            out, turn = os.dup(sock.fileno()), None
        except OSError:
            os.close(file)
            raise
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, SEND_TIMEOUT_US))
            os.set_blocking(out, True)
            while start < stop:
                turn = self._pool.submit(_send_turn, out, file, start, stop, may_continue)
                start = await asyncio.wrap_future(turn)
                if start < stop:
                    await _writable(out, timeout_s)
        finally:
            if turn is None:
                _close(out, file)
            else:  # closes at once, unless this was canceled during a turn
                turn.add_done_callback(lambda _: _close(out, file))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _send_turn(out: int, file: int, at: int, stop: int, may_continue: Callable[[], bool]) -> int:
    """Send until the reader falls behind or has received TURN_BYTES. Returns the position reached."""
    stop = min(stop, at + TURN_BYTES)
    while at < stop:
        if not may_continue():
            raise ConnectionResetError("withdrawn")
        try:
            sent = os.sendfile(out, file, at, min(SEND_BYTES, stop - at))
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
