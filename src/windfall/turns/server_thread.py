"""A turn server in a thread with an event loop of its own, so that whatever blocks the rest of the process, such as a
slow disk, delays no turn.

    any thread of the process ── call(method) ──▶ the server's thread        waits for the answer, at most CALL_S
                              ◀── turns that ended, events ──                in queues: the server waits for nobody
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from windfall.errors import WindfallError
from windfall.turns.server import TurnServer

CALL_S = 60.0
"""Seconds to wait for an answer of the server. It needs microseconds, unless the process is stopped."""
P = ParamSpec("P")
T = TypeVar("T")


class TurnServerThread:
    """The callbacks of the server run in its thread: they must not block."""

    def __init__(self, server: TurnServer) -> None:
        self.server = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread()

    def start(self, path: Path) -> None:
        """Serve turns at this Unix socket."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="turn server", daemon=True)
        self._thread.start()
        try:
            self._wait(asyncio.run_coroutine_threadsafe(self.server.start(path), self._loop))
        except BaseException:  # raised again: no thread may be left
            self._end(self._loop)
            raise

    def call(self, method: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of a method of the server. Any thread may call it."""
        if self._loop is None:  # nobody else uses the server
            return method(*args, **options)

        async def run() -> T:
            return method(*args, **options)

        return self._wait(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def close(self) -> None:
        """End all turns and connections, and the thread."""
        if self._loop is not None:
            try:
                self._wait(asyncio.run_coroutine_threadsafe(self.server.close(), self._loop))
            finally:
                self._end(self._loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = None
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join(CALL_S)
        if not self._thread.is_alive():
            loop.close()

    def _wait(self, answer: concurrent.futures.Future[T]) -> T:
        try:
            return answer.result(CALL_S)
        except concurrent.futures.TimeoutError as e:
            if answer.done():  # the method itself raised it
                raise
            what = f"waited {CALL_S:g} s for the server of device turns"
            raise WindfallError(what, where="turns", fix="Restart the service; no job is lost.") from e
