"""A link within one process: two bounded queues. Used for a worker in the same process, and by tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from windfall.link.base import LinkClosed


class _Shared:
    """State of both ends: whether the link is closed, and why."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.why = ""


class MemoryLink:
    def __init__(self, peer: str, shared: _Shared, inbox: asyncio.Queue[object], outbox: asyncio.Queue[object]) -> None:
        self.peer = peer
        self._shared = shared
        self._inbox = inbox
        self._outbox = outbox

    async def send(self, message: object) -> None:
        await self._unless_closed(self._outbox.put(message))

    async def receive(self) -> object:
        if not self._inbox.empty():  # messages sent before the close still arrive, as over a socket
            return self._inbox.get_nowait()
        return await self._unless_closed(self._inbox.get())

    async def _unless_closed(self, work: Coroutine[Any, Any, Any]) -> Any:
        doing, closed = asyncio.ensure_future(work), asyncio.ensure_future(self._shared.closed.wait())
        try:
            if not self._shared.closed.is_set():
                await asyncio.wait([doing, closed], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise LinkClosed(f"{self.peer}: {self._shared.why or 'closed'}")
        finally:
            doing.cancel()
            closed.cancel()

    def authenticated(self) -> None: ...  # a link in memory has no limits

    async def close(self, why: str = "") -> None:
        self._shared.why = self._shared.why or why
        self._shared.closed.set()


def pair(left: str = "left", right: str = "right", depth: int = 256) -> tuple[MemoryLink, MemoryLink]:
    """Two connected ends, first that of `left`. `depth`: how many messages may wait in each direction."""
    shared = _Shared()
    to_right: asyncio.Queue[object] = asyncio.Queue(depth)
    to_left: asyncio.Queue[object] = asyncio.Queue(depth)
    return MemoryLink(right, shared, to_left, to_right), MemoryLink(left, shared, to_right, to_left)
