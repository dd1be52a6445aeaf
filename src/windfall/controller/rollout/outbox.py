"""Messages on their way to workers: one queue and one link per worker. If a queue is full, its worker does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from windfall import errors
from windfall.link.base import Link, LinkClosed

MAX_QUEUED = 4096
"""Messages that may wait for one worker."""


class Outbox:
    def __init__(self, lose: Callable[[str, str], None]) -> None:
        """`lose(worker, why)` is called when nothing more can be sent to a worker."""
        self._lose = lose
        self._queues: dict[str, asyncio.Queue[Any]] = {}
        self._links: dict[str, Link] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def open(self, worker: str, link: Link) -> asyncio.Task[None]:
        """Start sending to a worker. Returns the task that sends until it is canceled."""
        self._links[worker], self._queues[worker] = link, asyncio.Queue(MAX_QUEUED)
        sending = asyncio.create_task(self._send_queued(worker, link), name=f"send to {worker}")
        sending.add_done_callback(errors.report_failure)
        return sending

    def close(self, worker: str, why: str) -> None:
        link = self._links.pop(worker)
        del self._queues[worker]
        closing = asyncio.create_task(link.close(why))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def send(self, worker: str, message: object) -> None:
        """Queue a message. It is dropped if the worker is gone."""
        queue = self._queues.get(worker)
        if queue is None:
            return
        try:
            queue.put_nowait(message)
        except asyncio.QueueFull:
            # Called later: the sender of this message is still in the middle of a decision.
            why = f"does not read: {MAX_QUEUED} messages wait for it"
            asyncio.get_running_loop().call_soon(self._lose, worker, why)

    async def _send_queued(self, worker: str, link: Link) -> None:
        queue = self._queues[worker]
        try:
            while True:
                await link.send(await queue.get())
        except LinkClosed as e:
            self._lose(worker, f"link closed ({e})")
