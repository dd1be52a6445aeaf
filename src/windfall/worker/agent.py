"""A worker: dials the controller, shows that it may join, builds the engine, serves, dials again when the link ends.

    dial ──▶ Challenge ──▶ Hello ──▶ Welcome ──▶ session: pull the weights ──▶ Loaded, serve ──▶ dial again, or end
                              │          └─ once ─▶ build the engine ──▶┘
                              └───▶ Refused: end (or later, again)

It ends when the controller sends it away or refuses it, when its machine is about to be taken (Notice), or when no
controller has answered for `patience_s`. Weights and engine outlive a link: after a glitch it is ready again at once,
also when it was warned: it works until its last seconds, and tells every controller how many are left.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import ssl as tls
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec

from windfall.errors import WindfallError
from windfall.fleet import process
from windfall.link import handshake
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.handshake import JoinRefused
from windfall.link.socket import Dialer, SocketLink
from windfall.types import Lease
from windfall.worker import preemption as notices
from windfall.worker.engine_thread import EngineThread
from windfall.worker.session import PulledWeights, Session, Stalled

TELL_S = 0.5
"""For the controller to hear why a worker refuses the run's model."""
LEAVE_S = 10.0
"""After a warning, the controller has so long to send it away."""


class Agent:
    def __init__(
        self,
        url: str,
        token: str,
        *,
        name: str,
        lease: Lease,
        build: Callable[[m.EngineSpec], tuple[Any, int]],
        puller: Any,
        boot: Callable[[], m.LoadTimes] = m.LoadTimes,
        ssl: tls.SSLContext | None = None,
        patience_s: float = 300.0,
        model: str = "",
        address: Callable[[], str] | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:
        """`build` makes (engine, slots), in the engine's thread, while the weights are pulled; `puller` is a
        weights.pull.Puller; `boot` says how long imports and building took, once that is over; `address` says where
        the controller listens now, if that may change."""
        self._dialer = Dialer(url, "/worker", m.ToWorker, ssl=ssl)
        self._token, self._name, self._lease, self._say = token, name, lease, say
        self._build, self._puller, self._patience_s = build, puller, patience_s
        self._model, self._address = model, address
        self._host: EngineThread | None = None
        self._boot, self._told = boot, False
        self._held: tuple[int, str] = (-1, "")
        self._session: Session | None = None
        self._refused = False
        """This worker cannot run the model: it tells the run and leaves."""
        self._notice: m.Notice | None = None
        """What it was warned of, with the least time left,"""
        self._taken_s = math.inf
        """and when that comes to pass (monotonic clock)."""
        self._end: asyncio.Future[int]

    async def run(self, clouds: Any = ()) -> int:
        """Until it ends; the exit status: 0 sent away, 1 no controller or a broken engine, 3 refused."""
        self._end = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(notices.watch(self.warned, clouds=clouds)) if clouds else None
        living = asyncio.create_task(self._live())
        if watching is not None:
            watching.add_done_callback(self._watched)
        try:
            await asyncio.wait([living, self._end], return_when=asyncio.FIRST_COMPLETED)
            return self._end.result() if self._end.done() else living.result()
        finally:
            for task in (living, watching):
                if task is not None:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
            await self._dialer.close()

    def _watched(self, watching: asyncio.Task[None]) -> None:
        """No cloud is here, which is all right; or one was asked for that there is not."""
        if not watching.cancelled() and (error := watching.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    def warned(self, notice: notices.PreemptionNotice) -> None:
        """The machine will be taken: tell the controller, which sends this worker away in time."""
        self._say(f"warned by {notice.source}: {notice.detail}")
        if notice.advice:
            return
        loop = asyncio.get_running_loop()
        told, left_s = m.Notice(source=notice.source, left_s=notice.left_s, detail=notice.detail), notice.left_s or 0.0
        built = self._host is not None and self._host.built
        if not built or (self._session is None and left_s < LEAVE_S):
            self._finish(0)  # nothing to hand over, or nobody to tell in time
            return
        if time.monotonic() + left_s < self._taken_s:
            self._notice, self._taken_s = told, time.monotonic() + left_s
        if self._session is not None:  # the next session says it otherwise
            self._session.say(told)
        loop.call_later(left_s + LEAVE_S, self._finish, 0)

    def _finish(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    async def _live(self) -> int:
        alone_s, wait_s, said = time.monotonic(), 0.2, ""
        while True:
            if self._address is not None:
                self._dialer.url = self._address()
            try:
                link = await self._dialer.dial(handshake.TIMEOUT_S)
                try:
                    welcome = await self._handshake(link)
                    alone_s, wait_s = time.monotonic(), 0.2
                    why = await self._attend(link, welcome)
                    self._say(f"sent away: {why}")
                    return 0
                finally:
                    alone_s = time.monotonic()
                    await link.close()
            except JoinRefused as e:
                if not e.again:
                    self._say(f"refused: {e}")
                    return 3
                if (line := f"refused for now: {e}") != said:  # the same again and again is said once
                    said = line
                    self._say(line)
                wait_s = min(wait_s, 0.5)
            except Stalled as e:
                self._say(str(e))
                return 1
            except LinkClosed as e:
                if self._refused or time.monotonic() + LEAVE_S > self._taken_s:
                    self._say(f"no link: {e}; leaving")
                    return 3 if self._refused else 0
                if str(e) != said:
                    said = str(e)
                    self._say(f"no link: {e}; dialling again for {self._patience_s:g} s")
            if time.monotonic() - alone_s > self._patience_s:
                self._say(f"waited {self._patience_s:g} s for a controller at {self._dialer.url}")
                return 1
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # not all workers of a fleet at once
            wait_s = min(5.0, wait_s * 1.6)

    async def _handshake(self, link: SocketLink) -> m.Welcome:
        version, digest = self._held
        hello = functools.partial(
            m.Hello, name=self._name, lease=self._lease, model=self._model, version=version, digest=digest,
            age_s=process.age_s(),
        )  # fmt: skip
        try:
            return await handshake.join(link, handshake.WORKER, self._token, hello)
        except handshake.ControllerUnverified as e:
            raise JoinRefused(str(e), again=False) from e

    async def _attend(self, link: SocketLink, welcome: m.Welcome) -> str:
        host = self._host or self._make_host(welcome)
        session = self._session = Session(
            link, host, self._pull, heartbeat_s=welcome.heartbeat_s, stalled_s=welcome.stalled_s, boot=self._started,
            pulled=lambda: getattr(self._puller, "bytes_received", 0),
        )  # fmt: skip
        session.held = self._held
        if self._notice is not None:
            session.say(msgspec.structs.replace(self._notice, left_s=max(0.0, self._taken_s - time.monotonic())))
        self._say(f"joined as {welcome.worker}")
        try:
            return await session.serve()
        finally:
            self._held, self._session = session.held, None

    def _make_host(self, welcome: m.Welcome) -> EngineThread:
        """Building takes a while, and goes on if the link ends. The session pulls and sends heartbeats meanwhile."""
        self._model = welcome.model
        host = self._host = EngineThread(None, make=lambda: self._build(welcome.engine))
        loop = asyncio.get_running_loop()
        host.start(lambda: loop.call_soon_threadsafe(self._broken) and None)
        return host

    def _started(self) -> m.LoadTimes:
        """What the start of this process has cost, once."""
        if self._told:
            return m.LoadTimes()
        self._told = True
        return msgspec.structs.replace(self._boot(), age_s=process.age_s())

    def _broken(self) -> None:
        assert self._host is not None
        error = self._host.failed
        if self._host.built:
            self._say(f"the engine failed: {type(error).__name__}: {error}")
            self._finish(1)
        elif isinstance(error, WindfallError):
            self._say(f"refused: {error}")
            self._refused = True
            if self._session is not None:  # the run must hear of it: nobody reads the log of a worker that is gone
                self._session.say(m.Left(why=str(error), refused=True))
            asyncio.get_running_loop().call_later(TELL_S, self._finish, 3)
        elif error is not None and not self._end.done():
            self._end.set_exception(error)  # nobody expected it

    def _pull(self, load: m.Load, give_up: threading.Event) -> PulledWeights:
        """In a thread. The tensors are views on the puller's buffer, taken over by the engine before the next pull."""
        before = self._puller.bytes_received
        session = self._session
        held = session is not None and session.held[1] == load.digest  # by the engine, not only by the puller
        manifest = self._puller.pull(self._reach(load.url), load.version, load.digest, stop=give_up)
        moved = self._puller.bytes_received - before
        return PulledWeights(digest=manifest.digest, tensors=None if held else self._puller.tensors(), bytes=moved)

    def _reach(self, url: str) -> str:
        """`_` stands for the controller's host, as it was dialled."""
        parts = urlsplit(url)
        if parts.hostname != "_":
            return url
        host = urlsplit(self._dialer.url).hostname or "127.0.0.1"
        return urlunsplit(parts._replace(netloc=f"[{host}]:{parts.port}" if ":" in host else f"{host}:{parts.port}"))
