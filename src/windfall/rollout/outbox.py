"""What is on its way to every worker: a queue and a link each. A worker that lets its queue fill up does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from windfall import unhandled
from windfall.link.base import Link, LinkClosed

OUTBOX = 4096
"""Messages that may wait for one worker."""


class Outbox:
    def __init__(self, lose: Callable[[str, str], None]) -> None:
        """`lose(worker, why)`: nothing can be sent to it any more."""
        self._lose = lose
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, worker: str, link: Link) -> asyncio.Task[None]:
        """The task that sends, until it is cancelled."""
        self._links[worker], self._queues[worker] = link, asyncio.Queue(OUTBOX)
        sending = asyncio.create_task(self._send(worker, link), name=f"send to {worker}")
        sending.add_done_callback(unhandled.report)
        return sending

    def close(self, worker: str, why: str) -> None:
        link = self._links.pop(worker)
        del self._queues[worker]
        closing = asyncio.create_task(link.close(why))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def tell(self, worker: str, message: object) -> None:
        queue = self._queues.get(worker)
        if queue is None:
            return
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            # Not from within a decision: whoever is telling is still in the middle of one.
            asyncio.get_running_loop().call_soon(self._lose, worker, f"does not read: {OUTBOX} messages wait for it")

    async def _send(self, worker: str, link: Link) -> None:
        queue = self._queues[worker]
        try:
            while True:
                await link.send(await queue.get())
        except LinkClosed as e:
            self._lose(worker, f"link closed ({e})")
