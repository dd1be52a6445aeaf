"""A link within one process: two bounded queues. For a worker in the same process, and for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from windfall.link.base import LinkClosed


class _Wire:
    """What both ends share: whether it is cut, and why."""

    def __init__(self) -> None:
        self.cut = asyncio.Event()
        self.why = ""


class MemoryLink:
    def __init__(self, peer: str, wire: _Wire, inbox: asyncio.Queue[object], outbox: asyncio.Queue[object]) -> None:
        self.peer = peer
        self._wire, self._inbox, self._outbox = wire, inbox, outbox

    async def send(self, message: object) -> None:
        await self._unless_cut(self._outbox.put(message))

    async def receive(self) -> object:
        if not self._inbox.empty():  # what was sent before the close still arrives, as over a socket
            return self._inbox.get_nowait()
        return await self._unless_cut(self._inbox.get())

    async def _unless_cut(self, work: Coroutine[Any, Any, Any]) -> Any:
        doing, cut = asyncio.ensure_future(work), asyncio.ensure_future(self._wire.cut.wait())
        try:
            if not self._wire.cut.is_set():
                await asyncio.wait([doing, cut], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            raise LinkClosed(f"{self.peer}: {self._wire.why or 'closed'}")
        finally:
            doing.cancel()
            cut.cancel()

    async def close(self, why: str = "") -> None:
        self._wire.why = self._wire.why or why
        self._wire.cut.set()


def pair(left: str = "left", right: str = "right", depth: int = 256) -> tuple[MemoryLink, MemoryLink]:
    """Two ends, `left`'s first. What one sends, the other receives."""
    wire = _Wire()
    there: asyncio.Queue[object] = asyncio.Queue(depth)
    back: asyncio.Queue[object] = asyncio.Queue(depth)
    return MemoryLink(right, wire, back, there), MemoryLink(left, wire, there, back)
