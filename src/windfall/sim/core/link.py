"""The controller's end of a link to a simulated worker or trainer: the Link interface, without a task per message.

It follows the rules of every link. Messages arrive in the order in which they were sent. Messages sent before the link
closed still arrive, unless the link breaks; after that, `LinkClosed` is raised. A message in either direction takes
`latency_s`. The latency may change, but no message overtakes another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from windfall.link.base import LinkClosed


class SimLink:
    def __init__(
        self, peer: str, deliver: Callable[[object], None], on_closed: Callable[[str], None], latency_s: float
    ) -> None:
        """`deliver` hands a message to the peer. `on_closed` is called when the controller closes the link."""
        self.peer, self.latency_s = peer, latency_s
        self._deliver, self._on_closed = deliver, on_closed
        self._loop = asyncio.get_running_loop()
        self._to_peer: deque[object] = deque()
        """Messages in flight from the controller to the peer."""
        self._to_controller: deque[object] = deque()
        """Messages in flight from the peer to the controller."""
        self._to_peer_s = self._to_controller_s = 0.0
        """When the last message in flight arrives, in each direction (loop time, seconds)."""
        self._inbox: deque[object] = deque()
        self._woken: asyncio.Future[None] | None = None
        self._closed: str | None = None
        """Why the link was closed. None: it is open."""

    # the controller's side

    async def send(self, message: object) -> None:
        if self._closed is not None:
            raise LinkClosed(f"{self.peer}: {self._closed}")
        self._to_peer.append(message)
        self._to_peer_s = self._call_after_latency(self._arrive_at_peer, self._to_peer_s)

    def authenticated(self) -> None: ...

    async def receive(self) -> object:
        while not self._inbox:
            if self._closed is not None and not self._to_controller:
                raise LinkClosed(f"{self.peer}: {self._closed}")
            self._woken = self._loop.create_future()
            await self._woken
        return self._inbox.popleft()

    async def close(self, why: str = "") -> None:
        if self._closed is None:
            self.cut(why or "closed")
            self._loop.call_soon(self._on_closed, why)

    # the peer's side

    def send_to_controller(self, message: object) -> None:
        if self._closed is None:
            self._to_controller.append(message)
            if self.latency_s or len(self._to_controller) > 1:
                self._to_controller_s = self._call_after_latency(self._arrive_at_controller, self._to_controller_s)
            else:
                self._arrive_at_controller()

    def cut(self, why: str) -> None:
        """Close the link at once, as when a machine disappears."""
        if self._closed is None:
            self._closed = why
            self._wake()

    def _call_after_latency(self, arrive: Callable[[], None], after_s: float) -> float:
        at_s = max(after_s, self._loop.time() + self.latency_s)
        if at_s > self._loop.time():
            self._loop.call_at(at_s, arrive)
        else:
            self._loop.call_soon(arrive)
        return at_s

    def _arrive_at_peer(self) -> None:
        message = self._to_peer.popleft()
        if self._closed is None:
            self._deliver(message)

    def _arrive_at_controller(self) -> None:
        if self._to_controller:  # empty if the messages were dropped in flight
            self._inbox.append(self._to_controller.popleft())
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)
