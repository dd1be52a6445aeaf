"""One link of a worker, from Welcome to its end: receives orders, sends frames and heartbeats.

serve()     waits for: orders from the controller      until the link ends, or the controller sends Drain
_send       waits for: frames of the engine's thread   a bounded number is queued; then the engine waits
_beat       waits for: the next heartbeat
_load       waits for: the weights (in a thread), then the engine, if it is still being built
                                                       canceled when another version of the same policy is requested; if
                                                       any of its parts is stuck, serving ends with Stalled

Rules of a load:
- The engine goes on with the old weights during the pull, and if the load fails.
- Loads of different policies are carried out one after the other.
- The last Load of a policy counts, even if it is for an older version. A Load that is already in progress is not begun
  again.
- Each completed load sends one Loaded, before any tokens that were generated with the new weights. A canceled load
  sends nothing. Tokens that the engine generated before the swap may follow a Loaded, under their own version.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from windfall.engine.engine_thread import EngineThread
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed
from windfall.weights.pulling.pull import PulledWeights

MAX_QUEUED_FRAMES = 64
"""Number of unsent frames at which the engine waits."""
LEAVE_S = 8.0
"""Time limit for sending the last tokens after a Drain (seconds)."""
BUILD_S = 900.0
"""Time limit (seconds) for building the engine, compiling kernels and capturing graphs, after the weights arrived."""
BUILD_CHECK_S = 0.01
"""Seconds between checks of whether the engine is built."""
SWAP_S = 120.0
"""Time limit for one engine step and a copy of the weights (seconds)."""
SWAP_CHECK_S = 1.0
"""Seconds between checks of whether a swap is late."""
PULL_S = 150.0
"""A pull without a byte or an error for this long (seconds) hangs. A puller's own limit is shorter,
also with the attempt that it is in (NO_BYTE_S in weights/pulling/file_sources.py)."""


class Stalled(Exception):
    """The engine, or the thread that pulls the weights, is stuck. This process is useless and must end."""


Pull = Callable[[m.Load, threading.Event], PulledWeights]
"""Pulls weights; blocks, so it runs in a thread. The event asks it to give up. It may raise any Exception."""


class WorkerLink:
    def __init__(
        self,
        link: Link,
        host: EngineThread,
        pull: Pull,
        *,
        heartbeat_s: float,
        stalled_s: float = math.inf,
        boot: Callable[[], m.LoadTimes] = m.LoadTimes,
        pulled_bytes: Callable[[], int] = lambda: 0,
        sent_bytes: Callable[[], int] = lambda: 0,
        reroute: Callable[[m.Routed], None] = lambda routed: None,
    ) -> None:
        """`boot` returns how long the start took; it is called when the weights are in the engine. `pulled_bytes` and
        `sent_bytes` return how many bytes of weights this process has received and sent to other workers. `reroute`
        tells a pull about other sources."""
        self.link = link
        self.host = host
        self._pull = pull
        self._boot = boot
        self._pulled_bytes = pulled_bytes
        self._sent_bytes = sent_bytes
        self._reroute = reroute
        self._heartbeat_s = heartbeat_s
        self._stalled_s = stalled_s
        self.held: dict[str, tuple[int, str]] = {}
        """By policy: version and digest of the weights in the engine."""
        self._loop = asyncio.get_running_loop()
        self._outbox: asyncio.Queue[object] = asyncio.Queue()
        self._room = threading.Semaphore(MAX_QUEUED_FRAMES)
        self._over = threading.Event()
        self._left_sent = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._waiting: dict[str, m.Load] = {}
        """By policy: the load that comes next."""
        self._routed: dict[tuple[str, str], m.ReadRoute] = {}
        """By policy and file: routes that came after the last Load, perhaps before its pull."""
        self._current: m.Load | None = None
        """The load in progress."""
        self._policy = ""
        """The policy of the load in progress, or of the last one."""
        self._give_up = threading.Event()
        """Ends the load in progress."""
        self._load_phase: Literal["", "pull", "build", "swap"] = ""
        """The part of the current load that is in progress."""
        self._pull_progress = (0, self._loop.time())
        """Bytes of weights received, and when that number last changed or a pull began (loop time, seconds)."""
        self._stuck: asyncio.Future[str] = self._loop.create_future()
        """Never has a result; its error ends `serve`."""

    async def serve(self) -> str:
        """Returns why the controller drained this worker. Raises LinkClosed if the link ended without a Drain."""
        self.host.attach(self._emit)
        background = [asyncio.create_task(self._send()), asyncio.create_task(self._beat())]
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([reading, *background, self._stuck], return_when=asyncio.FIRST_COMPLETED)
            for task in (self._stuck, reading, *background):
                if task.done():
                    return task.result() or ""  # or raise its error
            raise AssertionError("no task has ended")
        finally:
            self._over.set()
            self._stuck.cancel()
            self._give_up.set()
            self.host.detach()
            tasks = [reading, *background, *([self._loading] if self._loading else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # a cancellation of this task itself is not lost

    def say(self, message: object) -> None:
        self._outbox.put_nowait(message)

    def say_from_thread(self, message: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the link
            self._loop.call_soon_threadsafe(self._outbox.put_nowait, message)

    def _emit(self, message: object) -> None:
        """Send a message from the engine's thread. Waits while too many frames are unsent and the link is open."""
        if not self._room.acquire(blocking=False):
            self.host.emit_waits()
            while not self._room.acquire(timeout=0.1):
                if self._over.is_set():
                    return
        self.say_from_thread(message)

    async def _send(self) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await self.link.send(message)
            finally:
                if isinstance(message, m.Tokens | m.Released | m.Rejected | m.Capacity):
                    self._room.release()
            if isinstance(message, m.Left):
                self._left_sent.set()

    async def _beat(self) -> None:
        while True:
            now, pulled = self._loop.time(), self._pulled_bytes()
            if self._load_phase != "pull" or pulled != self._pull_progress[0]:
                self._pull_progress = (pulled, now)
            stats = msgspec.structs.replace(
                self.host.stats(), loading=self._load_phase, policy=self._policy, pulled_bytes=pulled,
                sent_bytes=self._sent_bytes(),
            )  # fmt: skip
            self.say(stats)
            if stats.idle_s > self._stalled_s:
                raise Stalled(f"no engine step for {stats.idle_s:.0f} s, with {stats.running} responses running")
            if (silent_s := now - self._pull_progress[1]) > PULL_S:
                raise Stalled(f"the pull of the weights hangs: no byte and no error for {silent_s:.0f} s")
            await asyncio.sleep(self._heartbeat_s)

    async def _read(self) -> str:
        while True:
            match message := await self.link.receive():
                case m.Assign():
                    self.host.add(message.work)
                case m.Cancel():
                    self.host.cancel(message.handles)
                case m.SiblingTokens():
                    self.host.remember(message)
                case m.Routed():
                    self._routed[message.policy, message.file] = message.route
                    self._reroute(message)
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
                    if message.again:
                        raise LinkClosed(f"{self.link.peer}: the run asks to join again: {message.why}")
                    return message.why
                case m.Refused():
                    return message.why
                case _:
                    raise LinkClosed(f"{self.link.peer}: unexpected message {type(message).__name__}")

    async def _leave(self, why: str) -> None:
        """Send all generated tokens, then Left, and nothing after that."""
        flushed = asyncio.Event()
        self.host.finish(lambda: self._loop.call_soon_threadsafe(flushed.set) and None)
        with contextlib.suppress(TimeoutError):  # do not wait for a stuck engine or a stuck link
            async with asyncio.timeout(LEAVE_S):
                if self.host.built:
                    await flushed.wait()  # at most one engine step
                self.say(m.Left(why=why))
                await self._left_sent.wait()

    def _begin_loading(self, load: m.Load) -> None:
        current = self._current if self._current is not None and self._current.policy == load.policy else None
        if load == self._waiting.get(load.policy, current):
            return
        self._waiting[load.policy] = load
        self._routed = {key: route for key, route in self._routed.items() if key[0] != load.policy}
        if current is not None:
            self._give_up.set()
        if self._current is None:
            self._current = load
            self._loading = asyncio.create_task(self._load_all())

    async def _load_all(self) -> None:
        """Only one pull at a time may use a buffer."""
        try:
            while self._waiting:
                self._current = load = self._waiting.pop(next(iter(self._waiting)))
                self._policy, self._give_up = load.policy, threading.Event()
                await self._load(load, self._give_up)
        finally:
            self._current = None

    async def _load(self, load: m.Load, give_up: threading.Event) -> None:
        started = time.monotonic()
        routed = {file: route for (policy, file), route in self._routed.items() if policy == load.policy}
        files = (m.FileRoute(file=f.file, route=routed.get(f.file.digest, f.route)) for f in load.files)
        load = msgspec.structs.replace(load, files=tuple(files))
        try:
            self._load_phase = "pull"
            weights = await asyncio.to_thread(self._pull, load, give_up)
            pulled = time.monotonic()
            self._load_phase = "build"
            await self._wait_until_built(give_up)
            if give_up.is_set():
                return
            self._load_phase = "swap"
            await self._swap(load, weights, started, pulled)
        except Stalled as e:
            if not self._stuck.done():
                self._stuck.set_exception(e)
        except Exception as e:  # fault boundary: any error is reported to the controller, which may retry
            if not give_up.is_set():
                self.say(m.LoadFailed(version=load.version, why=f"{type(e).__name__}: {e}", policy=load.policy))
        finally:
            self._load_phase = ""

    async def _wait_until_built(self, give_up: threading.Event) -> None:
        """Wait until the engine is built, or `give_up` is set. Until then, the swap is not queued as an order:
        it could not be canceled, and its tensors are in a buffer that the next pull overwrites."""
        deadline_s = time.monotonic() + BUILD_S
        while not self.host.built and not give_up.is_set():
            if time.monotonic() > deadline_s:
                raise Stalled(f"waited {BUILD_S:g} s for the engine to be built")
            await asyncio.sleep(BUILD_CHECK_S)

    async def _swap(self, load: m.Load, weights: PulledWeights, started: float, pulled: float) -> None:
        """Swap the weights between two engine steps, and send Loaded. The pull lasted from `started` to `pulled`
        (monotonic clock, seconds)."""
        done: asyncio.Future[None] = self._loop.create_future()
        swapping, others = time.monotonic(), {name: held for name, held in self.held.items() if name != load.policy}
        if others and not self.host.capabilities.adapters:
            raise WindfallError(f"this engine holds one policy, and has {next(iter(others))!r}")
        held, self.held = self.held, {}  # until the swap is known to be complete

        def finish(error: BaseException | None) -> None:
            if done.done() or self._over.is_set():
                return
            if error is not None:
                if isinstance(error, WindfallError):  # nothing has changed
                    self.held = held
                done.set_exception(error)
                return
            # Here, and not in the task that waits: a frame of the next step may already be on its way.
            self.held = others | {load.policy: (load.version, weights.digest)}
            now = time.monotonic()
            parts = msgspec.structs.replace(self._boot(), pull_s=pulled - started, swap_s=now - swapping)
            self.say(
                m.Loaded(
                    version=load.version,
                    digest=weights.digest,
                    slots=self.host.slots,
                    s=now - started,
                    pulled_bytes=weights.bytes,
                    parts=parts,
                    longest=self.host.longest,
                    engine=self.host.capabilities,
                    kv_tokens=self.host.kv_tokens,
                    used=weights.used,
                    apply_s=weights.apply_s,
                    policy=load.policy,
                )
            )
            done.set_result(None)

        def swapped(error: BaseException | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the link
                self._loop.call_soon_threadsafe(finish, error)

        self.host.swap(load.version, weights.tensors, swapped, policy=load.policy)
        deadline_s = self._loop.time() + SWAP_S
        while not done.done():
            await asyncio.wait([done], timeout=min(SWAP_CHECK_S, SWAP_S))
            if self.host.waiting_for_trainer:
                deadline_s = self._loop.time() + SWAP_S
            elif self._loop.time() >= deadline_s and not done.done():
                raise Stalled(f"waited {SWAP_S:g} s for the engine to load version {load.version}")
        done.result()
