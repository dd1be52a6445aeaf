"""One link of a worker, from Welcome to its end: orders in, frames and heartbeats out.

serve()     waits for: orders from the controller      until: the link ends, or the controller says Drain
_send       waits for: frames of the engine's thread   a bounded number may wait; then the engine does
_beat       waits for: the next heartbeat
_load       waits for: the weights (in a thread), then the engine, if it is still being built
                                                       given up when a newer version is asked for; stuck in any of its
                                                       parts, it ends the session with Stalled
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed
from windfall.worker.engine_thread import EngineThread
from windfall.worker.startup import built

FRAMES = 64
"""That may wait to be sent before the engine waits, too."""
LEAVE_S = 8.0
SWAP_S = 120.0
"""For one engine step and a copy of the weights."""
LOOK_S = 1.0
PULL_S = 150.0
"""A pull that neither gets a byte nor fails for this long hangs: without a byte, a puller's own limits take 105 s."""


class Stalled(Exception):
    """The engine, or the thread that pulls the weights, is stuck: this process is of no more use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PulledWeights:
    """What a pull brought: None for `tensors` means that the engine has these weights already."""

    digest: str
    tensors: Mapping[str, Any] | None
    bytes: int = 0


Pull = Callable[[m.Load, threading.Event], PulledWeights]
"""Blocking; runs in a thread. The event asks it to give up. Raises any Exception, whose text says why."""


class Session:
    def __init__(
        self, link: Link, host: EngineThread, pull: Pull, *, heartbeat_s: float, stalled_s: float = math.inf,
        boot: Callable[[], m.LoadTimes] = m.LoadTimes, pulled: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """`boot` says, when the weights are in the engine, what a start has cost; `pulled`, how many bytes of weights
        have come since the process began."""
        self.link, self.host, self._pull, self._boot, self._pulled = link, host, pull, boot, pulled
        self._heartbeat_s, self._stalled_s = heartbeat_s, stalled_s
        self.held: tuple[int, str] = (-1, "")
        """Version and digest of the weights that the engine has."""
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[object] = asyncio.Queue()
        self._room = threading.Semaphore(FRAMES)
        self._over, self._left = threading.Event(), asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._give_up = threading.Event()
        self._part: Literal["", "pull", "build", "swap"] = ""
        """What the load under way waits for."""
        self._moved = (0, self._loop.time())
        """Bytes of weights that have come, and when the last of them was seen, or a pull began."""
        self._stuck: asyncio.Future[str] = self._loop.create_future()
        """Never has a result; its error ends the session."""

    async def serve(self) -> str:
        """Returns why the controller sent it away. Raises LinkClosed when the link ended by itself."""
        self.host.attach(self._emit)
        helpers = [asyncio.create_task(self._send()), asyncio.create_task(self._beat())]
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([reading, *helpers, self._stuck], return_when=asyncio.FIRST_COMPLETED)
            for task in (self._stuck, reading, *helpers):
                if task.done():
                    return task.result() or ""  # or its error
            raise AssertionError("nobody ended")
        finally:
            self._over.set()
            self._stuck.cancel()
            self._give_up.set()
            self.host.detach()
            for task in [reading, *helpers, *([self._loading] if self._loading else [])]:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, LinkClosed):
                    await task

    def say(self, message: object) -> None:
        """From the event loop's thread."""
        self._outbox.put_nowait(message)

    def _emit(self, message: object) -> None:
        """From the engine's thread. Waits while too much is unsent, unless the link is over."""
        while not self._room.acquire(timeout=0.1):
            if self._over.is_set():
                return
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the link
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    async def _send(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self.link.send(message)
            finally:
                if isinstance(message, m.Tokens | m.Released | m.Rejected):
                    self._room.release()
            if isinstance(message, m.Left):
                self._left.set()

    async def _beat(self) -> None:
        while True:
            now, pulled = self._loop.time(), self._pulled()
            if self._part != "pull" or pulled != self._moved[0]:
                self._moved = (pulled, now)
            stats = msgspec.structs.replace(self.host.stats(), loading=self._part, pulled_bytes=pulled)
            self.say(stats)
            if stats.idle_s > self._stalled_s:
                raise Stalled(f"no engine step for {stats.idle_s:.0f} s, with {stats.running} responses to make")
            if now - self._moved[1] > PULL_S:
                raise Stalled(f"the pull of the weights hangs: no byte and no error for {now - self._moved[1]:.0f} s")
            await asyncio.sleep(self._heartbeat_s)

    async def _read(self) -> str:
        while True:
            match message := await self.link.receive():
                case m.Assign():
                    self.host.add(message.work)
                case m.Cancel():
                    self.host.cancel(message.handles)
                case m.Release():
                    self.host.release(message.handles)
                case m.Load():
                    self._begin_loading(message)
                case m.Pause():
                    self.host.pause(True)
                case m.Resume():
                    self.host.pause(False)
                case m.Drain():
                    await self._leave(message.why)
                    return message.why
                case m.Refused():
                    return message.why
                case _:
                    raise LinkClosed(f"{self.link.peer}: a {type(message).__name__} was not expected")

    async def _leave(self, why: str) -> None:
        """What was made is sent, then Left; nothing comes after that."""
        flushed = asyncio.Event()
        self.host.finish(lambda: self._loop.call_soon_threadsafe(flushed.set) and None)
        with contextlib.suppress(TimeoutError):  # nobody waits for an engine that is stuck, or for a link that is
            async with asyncio.timeout(LEAVE_S):
                if self.host.built:
                    await flushed.wait()  # at most one engine step
                self.say(m.Left(why=why))
                await self._left.wait()

    def _begin_loading(self, load: m.Load) -> None:
        self._give_up.set()
        self._give_up = threading.Event()
        before, self._loading = self._loading, None
        self._loading = asyncio.create_task(self._load(load, self._give_up, before))

    async def _load(self, load: m.Load, give_up: threading.Event, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)  # one pull at a time uses the buffer
        if give_up.is_set():
            return
        started = time.monotonic()
        try:
            self._part = "pull"
            weights = await asyncio.to_thread(self._pull, load, give_up)
            pulled = time.monotonic()
            self._part = "build"
            await self._built(give_up)
            if give_up.is_set():
                return
            self._part, swapping = "swap", time.monotonic()
            if weights.tensors is not None:
                self.held = (-1, "")  # from here on the engine may have some of the new ones: nothing to go back to
            await self._swap(load.version, weights.tensors)
        except Stalled as e:
            if not self._stuck.done():
                self._stuck.set_exception(e)
            return
        except Exception as e:  # fault boundary: whatever it is, the controller is told, and may ask again
            if not give_up.is_set():
                self.say(m.LoadFailed(version=load.version, why=f"{type(e).__name__}: {e}"))
            return
        finally:
            self._part = ""
        self.held = (load.version, weights.digest)
        now = time.monotonic()
        parts = msgspec.structs.replace(self._boot(), pull_s=pulled - started, swap_s=now - swapping)
        self.say(
            m.Loaded(version=load.version, digest=weights.digest, slots=self.host.slots, s=now - started,
                     pulled_bytes=weights.bytes, parts=parts, longest=self.host.longest)
        )  # fmt: skip

    async def _built(self, give_up: threading.Event) -> None:
        try:
            await built(self.host, give_up)
        except TimeoutError as e:
            raise Stalled(str(e)) from None

    async def _swap(self, version: int, tensors: Mapping[str, Any] | None) -> None:
        done: asyncio.Future[None] = self._loop.create_future()

        def tell(error: BaseException | None) -> None:
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)

        self.host.swap(version, tensors, lambda error: self._loop.call_soon_threadsafe(tell, error) and None)
        late_s = self._loop.time() + SWAP_S
        while not done.done():
            await asyncio.wait([done], timeout=min(LOOK_S, SWAP_S))
            if self.host.excused:
                late_s = self._loop.time() + SWAP_S
            elif self._loop.time() >= late_s and not done.done():
                raise Stalled(f"waited {SWAP_S:g} s for the engine to take version {version}")
        done.result()
