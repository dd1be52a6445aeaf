"""The trainer's process, around the trainer: dials the controller, does what it asks in one thread, publishes weights.

    dial ──▶ TrainerHello(step, weights) ──▶ TrainerWelcome ──▶ [ Prepare | Accumulate | Update | Save ]* ──▶ dial again
                                       └───▶ Refused: end                              when the link ends

It obeys nobody who has not proved to be the run's controller, and goes on looking for that one. What was accumulated
for a step under way is dropped with the link: the controller sends it again, from its journal. A link that ends between
two updates of one step leaves weights that are of no version: the process ends, and the next one starts from the last
checkpoint. Work that raises (out of memory, a defect) is told to the controller and ends the process, too: the
supervisor starts it again, a limited number of times (launch/liveness.py).
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from windfall import errors
from windfall.errors import WindfallError
from windfall.link import auth
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed, clip
from windfall.link.socket import Dialler
from windfall.train.base import Trainer
from windfall.train.checkpoint import CheckpointState
from windfall.train.remote import unpack

SHAKE_S = 10.0
REFUSALS = 3
"""In a row, and it ends. One may come from another run, whose controller has just taken the port of a dead one."""


class ControllerRefused(LinkClosed):
    """By a controller that will not change its mind."""


@dataclass(kw_only=True)
class TrainerHost:
    trainer: Trainer
    state: CheckpointState
    publish: Callable[[int], Any]
    """Makes the trainer's weights readable as this version; returns their manifest. May `let_go` of the module."""
    save: Callable[[CheckpointState], Any]
    hello: Callable[..., m.TrainerHello]
    """Fills in what is known of the run; given protocol, nonce, proof, state, version and digest."""
    secret: str
    """The trainer's own, not the token that workers have."""
    dialler: Dialler
    address: Callable[[], str]
    """Where the controller listens now."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the trainer works on the module, which its own engine shares."""
    make_room: Callable[[], None] = lambda: None
    """Called with the lock held, before work that needs the device's memory: its own engine may have much of it."""
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    """The controller knows this trainer."""
    patience_s: float = 120.0
    again_s: float = 0.2
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    _holding: bool = False
    """Read and written by the one thread that does all tensor work."""

    @property
    def manifest(self) -> Any:
        """What was published last."""
        return self._manifest

    async def run(self) -> int:
        """Until it ends; the exit status: 1 no controller, 2 refused, 4 the weights are of no version."""
        self._updates, refusals, said = 0, 0, ""
        self._manifest: Any = None
        alone_s = time.monotonic()
        with ThreadPoolExecutor(1, thread_name_prefix="tensors") as threads:
            self._threads = threads
            self._manifest = await self._do(self.publish, self.state.step)
            while time.monotonic() - alone_s < self.patience_s:
                self.dialler.url = self.address()
                try:
                    link = await self.dialler.dial(SHAKE_S)
                    try:
                        await self._shake(link)
                        self.connected.set()
                        refusals, said = 0, ""
                        try:
                            await self._serve(link)
                        finally:
                            alone_s = time.monotonic()
                    finally:
                        await link.close()
                except LinkClosed as e:
                    refusals = refusals + 1 if isinstance(e, ControllerRefused) else 0
                    if str(e) != said:  # the same again and again is said once
                        said = str(e)
                        self.say(f"no link: {said}")
                if self._updates:
                    return 4
                if refusals >= REFUSALS:
                    return 2
                await self._do(self.trainer.begin)
                await asyncio.sleep(5 * self.again_s if refusals else self.again_s)
        self.say(f"waited {self.patience_s:g} s for the run's controller at {self.dialler.url}")
        return 1

    async def _shake(self, link: Link) -> None:
        try:
            async with asyncio.timeout(SHAKE_S):
                await self._prove(link)
        except TimeoutError:
            raise LinkClosed(f"{link.peer}: waited {SHAKE_S:g} s for its TrainerWelcome") from None

    async def _prove(self, link: Link) -> None:
        challenge = await link.receive()
        if not isinstance(challenge, m.Challenge):
            raise LinkClosed(f"{link.peer}: not a windfall controller")
        nonce = auth.nonce()
        await link.send(
            self.hello(
                protocol=m.PROTOCOL,
                nonce=nonce,
                proof=auth.proof(self.secret, "trainer", challenge.run, challenge.nonce, nonce),
                step=self.state.step,
                next_task=self.state.next_task,
                version=self._manifest.version,
                digest=self._manifest.digest,
            )
        )
        answer = await link.receive()
        if isinstance(answer, m.Refused):
            raise (LinkClosed if answer.again else ControllerRefused)(f"{link.peer}: refused: {clip(answer.why)}")
        if not isinstance(answer, m.TrainerWelcome) or not auth.same(
            answer.proof, auth.proof(self.secret, "trainer welcome", challenge.run, challenge.nonce, nonce)
        ):
            raise LinkClosed(f"{link.peer}: it does not know this run's secret: not the controller of this run")

    async def _serve(self, link: Link) -> None:
        orders: asyncio.Queue[object] = asyncio.Queue()

        async def read() -> None:
            while True:  # also while the thread works: so that the link's heartbeat is answered
                orders.put_nowait(await link.receive())

        reading = asyncio.create_task(read())
        try:
            while True:
                getting = asyncio.create_task(orders.get())
                await asyncio.wait([getting, reading], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    reading.result()
                try:
                    reply = await self._obey(getting.result())
                except Exception as e:  # fault boundary: the controller shows it, and this process ends with it
                    final = isinstance(e, WindfallError)
                    await link.send(m.Failed(error=str(e) if final else errors.last_line(e), final=final))
                    raise
                await link.send(reply)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _obey(self, order: object) -> object:
        started = time.monotonic()
        match order:
            case m.Prepare():
                fixed = await self._do(self.trainer.prepare, [unpack(s) for s in order.samples], room=True)
                return m.Prepared(old=tuple(np.asarray(s.old, np.float64).tobytes() for s in fixed))
            case m.Accumulate():
                await self._do(self.trainer.accumulate, [unpack(s) for s in order.samples], room=True)
                return m.Done(s=time.monotonic() - started)
            case m.Update():
                self._updates += 1  # until the step's last, the weights are of no version
                report = await self._do(self.trainer.finish, room=True)
                if order.step is not None and order.next_task is not None:
                    self._manifest = await self._do(self.publish, order.step)
                    self.state, self._updates = CheckpointState(step=order.step, next_task=order.next_task), 0
                return m.Updated(
                    report=asdict(report),
                    version=self._manifest.version,
                    digest=self._manifest.digest,
                    s=time.monotonic() - started,
                )
            case m.Save():
                return m.Saved(path=str(await self._do(self.save, self.state)))
        raise LinkClosed(f"a {type(order).__name__} was not expected")

    async def _do(self, work: Callable[..., Any], *args: Any, room: bool = False) -> Any:
        def alone() -> Any:
            self.lock.acquire()
            self._holding = True
            try:
                if room:
                    self.make_room()
                return work(*args)
            finally:
                self.let_go()

        return await asyncio.get_running_loop().run_in_executor(self._threads, alone)

    def let_go(self) -> None:
        """To be called by the work under way, from its thread, once it needs the module no more: the trainer's engine
        may go on while a version is being hashed. Nothing else overlaps: the controller's next order waits for the
        answer to this one, which carries the digest."""
        if self._holding:
            self._holding = False
            self.lock.release()
