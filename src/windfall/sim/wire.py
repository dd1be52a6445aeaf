"""The controller's end of a link to a simulated worker: the Link seam, without a task or a timer per message.

Rules, as of any link: messages come in the order in which they were sent; what was sent before the end still arrives;
after it, LinkClosed. `latency_s` is how long a message is under way, in either direction.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from windfall.link.base import LinkClosed


class Wire:
    def __init__(
        self, peer: str, hear: Callable[[object], None], ended: Callable[[str], None], latency_s: float
    ) -> None:
        """`hear`: the worker gets a message; `ended`: the controller has closed the link."""
        self.peer = peer
        self._hear, self._ended, self._latency_s = hear, ended, latency_s
        self._loop = asyncio.get_running_loop()
        self._there: deque[object] = deque()
        self._coming: deque[object] = deque()
        self._inbox: deque[object] = deque()
        self._woken: asyncio.Future[None] | None = None
        self._cut: str | None = None

    # the controller's side

    async def send(self, message: object) -> None:
        if self._cut is not None:
            raise LinkClosed(f"{self.peer}: {self._cut}")
        self._there.append(message)
        self._later(self._arrive)

    async def receive(self) -> object:
        while not self._inbox:
            if self._cut is not None and not self._coming:
                raise LinkClosed(f"{self.peer}: {self._cut}")
            self._woken = self._loop.create_future()
            await self._woken
        return self._inbox.popleft()

    async def close(self, why: str = "") -> None:
        if self._cut is None:
            self.cut(why or "closed")
            self._loop.call_soon(self._ended, why)

    # the worker's

    def say(self, message: object) -> None:
        if self._cut is None:
            self._coming.append(message)
            if self._latency_s:
                self._later(self._come)
            else:
                self._come()

    def cut(self, why: str) -> None:
        """At once, as when a machine vanishes."""
        if self._cut is None:
            self._cut = why
            self._wake()

    def _later(self, what: Callable[[], None]) -> None:
        if self._latency_s:
            self._loop.call_later(self._latency_s, what)
        else:
            self._loop.call_soon(what)

    def _arrive(self) -> None:
        message = self._there.popleft()
        if self._cut is None:
            self._hear(message)

    def _come(self) -> None:
        self._inbox.append(self._coming.popleft())
        self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
