"""The controller's end of a link to a simulated worker or trainer: the Link seam, without a task per message.

Rules, as of any link: messages come in the order in which they were sent; what was sent before the end still arrives,
unless the link breaks; after it, LinkClosed. `latency_s` is how long a message is under way, in either direction; it
may change, and nothing overtakes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from windfall.link.base import LinkClosed


class SimLink:
    def __init__(
        self, peer: str, hear: Callable[[object], None], ended: Callable[[str], None], latency_s: float
    ) -> None:
        """`hear`: the worker gets a message; `ended`: the controller has closed the link, or is gone."""
        self.peer, self.latency_s = peer, latency_s
        self._hear, self._ended = hear, ended
        self._loop = asyncio.get_running_loop()
        self._there: deque[object] = deque()
        self._coming: deque[object] = deque()
        self._there_s = self._coming_s = 0.0
        """When the last of them arrives."""
        self._inbox: deque[object] = deque()
        self._woken: asyncio.Future[None] | None = None
        self._cut: str | None = None

    @property
    def over(self) -> bool:
        return self._cut is not None

    # the controller's side

    async def send(self, message: object) -> None:
        if self._cut is not None:
            raise LinkClosed(f"{self.peer}: {self._cut}")
        self._there.append(message)
        self._there_s = self._later(self._arrive, self._there_s)

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

    def vanish(self, why: str) -> None:
        """The controller is gone, with all that it had not taken in."""
        if self._cut is None:
            self.break_off(why)
            self._loop.call_soon(self._ended, why)

    # the worker's

    def say(self, message: object) -> None:
        if self._cut is None:
            self._coming.append(message)
            if self.latency_s or len(self._coming) > 1:
                self._coming_s = self._later(self._come, self._coming_s)
            else:
                self._come()

    def cut(self, why: str) -> None:
        """At once, as when a machine vanishes."""
        if self._cut is None:
            self._cut = why
            self._wake()

    def break_off(self, why: str) -> None:
        """As `cut`, and what is under way to the controller is lost."""
        self._coming.clear()
        self._inbox.clear()
        self.cut(why)

    def _later(self, what: Callable[[], None], after_s: float) -> float:
        at_s = max(after_s, self._loop.time() + self.latency_s)
        if at_s > self._loop.time():
            self._loop.call_at(at_s, what)
        else:
            self._loop.call_soon(what)
        return at_s

    def _arrive(self) -> None:
        message = self._there.popleft()
        if self._cut is None:
            self._hear(message)

    def _come(self) -> None:
        if self._coming:  # else they were lost on the way
            self._inbox.append(self._coming.popleft())
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
