"""The service of a policy in its trainer: dials the controller, runs its requests in one thread, and publishes weights.

    dial ──▶ TrainerHello(step, weights) ──▶ TrainerWelcome ──▶ [ a verb of verbs.py ]* ──▶ dial again
                                       └───▶ Refused: end                 when the link ends

It accepts requests only from a controller that has proved that it belongs to the run, and keeps dialing until it finds
that controller. When the link ends, the gradient accumulated for the current step is dropped; the controller
sends the samples again from its journal. If the link ends between two updates of one step, the weights belong to no
version: the process exits, and the next one starts from the last checkpoint. If it ends between the last update and
Publish, the trainer publishes before it dials again. An exception during work (out of memory, a
defect) is reported to the controller and also ends the process. The supervisor restarts it a limited number of times
(run/liveness.py).

A trainer of several policies has a service for each. They share the thread, so their requests are performed in the
order in which they arrive, each as a whole.

From a step's first update until the controller sends a Load for the new version, the trainer's own engine generates
nothing (`invalidate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from windfall import backoff, errors
from windfall.algorithms.given import Loss
from windfall.errors import WindfallError
from windfall.link import handshake
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed
from windfall.link.socket import Dialer
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn
from windfall.training import Adam, CheckpointState, Report, Sample
from windfall.turns.client import FREE, CanSleep, DeviceTurn, of_environment

MAX_REFUSALS = 3
"""Final refusals in a row after which the process exits. A single refusal may come from another run whose controller
has just taken over the port of a dead controller."""

DEVICE_WAIT_S = 10.0
"""Seconds of one wait for the turn of the devices; there is no limit to how often it waits."""
NO_WISHES = m.Publish(id="")
"""For a version that the controller did not ask for."""


def cannot_load(path: str) -> CheckpointState:
    raise WindfallError(
        "this trainer cannot load a checkpoint while it runs", where=path, fix="Start a run with it: model.path."
    )


class Trainer(Protocol):
    """Implemented by trainer.trainer.TorchTrainer. `tests/trainer/test_trainer.py` is its contract."""

    def forward(self, samples: Sequence[Sample], loss: Loss | None = None) -> list[Sample]: ...
    def zero_grad(self) -> None: ...
    def forward_backward(self, samples: Sequence[Sample], loss: Loss | None = None) -> Sequence[np.ndarray]: ...
    def optim_step(self, adam: Adam | None = None) -> Report: ...


class OwnEngine:
    """The trainer's own engine, the worker named `local`, as the trainer sees it: they take turns on the trainer's
    device. run/local_worker.py builds one; this class is for a run without it.

    If other jobs share the devices, the trainer first takes the turn of all its devices (turns/client.py). Rank 0 does
    this for the other ranks, which work only when it says so."""

    def __init__(self, *, first: bool = True, device: DeviceTurn | None = None, state: CanSleep | None = None) -> None:
        """`first`: whether this is rank 0. `device`: the turn of its devices; by default, as the environment says.
        `state`: what can sleep while other jobs train on its device."""
        self.turn = TrainerTurn()
        self.device = device or (of_environment("train", state=state) if first else FREE)
        self.engine: TrainerEngine | None = None
        """Set when it is built."""
        self._working = False
        """Whether the trainer has the turn. Used only by the one thread that does all tensor work."""

    @contextlib.contextmanager
    def trainer_works(self, *, room: bool, tokens: int = 0) -> Iterator[None]:
        """The trainer has the turn in this context, or until it calls `release`. `room`: the engine frees the device
        memory that it does not need meanwhile. `tokens`: how many the work trains on."""
        while not self.device.take(DEVICE_WAIT_S):
            pass
        self.turn.acquire()
        self._working = True
        try:
            if room and self.engine is not None:
                self.engine.make_room()
            yield
        finally:
            self.release(tokens)

    def release(self, tokens: int = 0) -> None:
        """End the trainer's turn early, once the current work no longer needs the module and the device."""
        if self._working:
            self._working = False
            self.turn.release()
            self.device.give(tokens)

    @property
    def lent_bytes(self) -> int:
        """Device memory that the engine has freed for the trainer's work, and allocates again for its next step."""
        return 0 if self.engine is None else self.engine.lent_bytes

    def invalidate(self) -> None:
        """The weights are about to change: generate nothing before they belong to a version again."""
        if self.engine is not None:
            self.engine.invalidate()

    def build(self, terms: EngineTerms) -> None:
        """Build the engine of this rank. Ranks other than the first also begin to generate."""

    async def run(self, trainer: TrainerService, terms: EngineTerms) -> None:
        """Build the engines of all ranks, and generate for the run. Raises an error if an engine cannot be built."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineTerms:
    """What a rank must know to generate for the run."""

    spec: m.EngineSpec
    url: str
    """Address of the controller when the trainer started."""
    secret: str
    """The trainer's secret."""
    weights_key: str
    folder: Path
    """The folder of the run, which ranks on the machine of rank 0 can open."""


@dataclass(kw_only=True)
class TrainerService:
    trainer: Trainer | None
    """None: the policy is frozen, or a copy of another one."""
    state: CheckpointState
    publish: Callable[[int, m.Publish], Any]
    """Publishes the trainer's weights as this version, and returns their manifest. The message says which files
    must stay. May call `engine.release`."""
    save: Callable[[CheckpointState], Any]
    weights: Callable[[], m.PublishedFiles | None] = lambda: None
    """Returns what workers can read; None: they need not read."""
    hello: Callable[..., m.TrainerHello]
    """Builds the TrainerHello from protocol, nonce, proof, step, next_task, version and digest."""
    secret: str
    """The trainer's own secret, not the token of the workers."""
    dialer: Dialer
    address: Callable[[], str]
    """Returns the address where the controller listens now."""
    engine: OwnEngine = field(default_factory=OwnEngine)
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the controller has accepted this trainer."""
    patience_s: float = 120.0
    """Seconds without a controller after which the process exits."""
    retry_s: float = 0.2
    """Seconds between two attempts to dial. If the controller answers, but its handshake fails, they double up to 25
    times this."""
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
    upload_again: Callable[[tuple[str, ...]], None] = lambda files: None
    """Replaces files that are damaged in the bucket."""
    load: Callable[[str], CheckpointState] = cannot_load
    """Loads a checkpoint into the module and the optimizer; returns its state."""
    copies: bool = False
    """The policy is a copy of another one: it can be published at any time, and `publish` knows its version."""
    threads: ThreadPoolExecutor | None = None
    """The one thread that does all tensor work of the process. None: the service has its own."""
    _updates: int = field(default=0, init=False)
    """Optimizer updates since the last version was published."""
    _completed: CheckpointState | None = field(default=None, init=False)
    """The state after the step that is complete but not published yet."""
    _early: m.PublishedVersion | None = field(default=None, init=False)
    """The version that was published because the link was lost before Publish: the answer to that Publish."""
    _answers: dict[str, object] = field(default_factory=dict, init=False)
    """Answers to the verbs since the last update, by their ids."""
    _used_answers: dict[str, object] = field(default_factory=dict, init=False)
    """Answers to the verbs before that: up to and including the last update."""

    @property
    def manifest(self) -> Any:
        """Manifest of the weights' version. None from a step's first update until its result is published."""
        return None if self._updates else self._manifest

    def tell(self, message: m.Uploaded) -> None:
        """Send the controller a message that it has not asked for, if it is connected. Any thread may call it."""
        asyncio.run_coroutine_threadsafe(self._tell(message), self._loop)

    async def _tell(self, message: m.Uploaded) -> None:
        if self._link is not None:
            with contextlib.suppress(LinkClosed):
                await self._link.send(message)

    async def run(self) -> int:
        """Serve until the process should exit. Exit status: 1 no controller, 2 refused, 4 weights of no version."""
        refusals, unwelcome, logged = 0, 0, ""
        self._manifest: Any = None
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        last_link_s = time.monotonic()
        own = ThreadPoolExecutor(1, thread_name_prefix="tensors") if self.threads is None else None
        with own or contextlib.nullcontext(self.threads) as threads:
            self._threads = threads
            self._manifest = await self.run_in_thread(self.publish, self.state.step, NO_WISHES)
            last_link_s = time.monotonic()  # it may have waited for its turn of the device
            while time.monotonic() - last_link_s < self.patience_s:
                self.dialer.url = self.address()
                earlier, unwelcome = unwelcome, 0
                try:
                    link = await self.dialer.dial(handshake.TIMEOUT_S)
                    unwelcome = earlier + 1
                    try:
                        await self._handshake(link)
                        self.connected.set()
                        self._link = link
                        refusals, unwelcome, logged = 0, 0, ""
                        try:
                            await self._serve(link)
                        finally:
                            self._link, last_link_s = None, time.monotonic()
                    finally:
                        await link.close()
                except LinkClosed as e:
                    refused = isinstance(e, handshake.JoinRefused)
                    refusals = refusals + 1 if refused and not e.again else 0
                    why = f"{self.dialer.url}: refused: {e}" if refused else str(e)
                    if why != logged:  # do not repeat the same line
                        logged = why
                        self.say(f"no link: {why}")
                before_s = time.monotonic()
                if (code := await self._link_ended()) is not None:
                    return code
                if refusals >= MAX_REFUSALS:
                    return 2
                last_link_s += time.monotonic() - before_s  # the wait for its turn is none for a controller
                wait_s = backoff.delay_s(unwelcome, first_s=self.retry_s, limit_s=25 * self.retry_s)
                await asyncio.sleep(max(wait_s, 5 * self.retry_s) if refusals else wait_s)
        self.say(f"waited {self.patience_s:g} s for the run's controller at {self.dialer.url}")
        return 1

    async def _link_ended(self) -> int | None:
        """Keep only what belongs to a version. Returns the exit status if the weights belong to none."""
        if self._completed is not None:  # the link was lost before Publish: this step must not be lost, too
            self._early = await self._publish()
        if self._updates:
            return 4
        # Gradients are dropped, and log-probs were perhaps for a controller that is gone: these are asked anew.
        again = (m.GradientAdded, m.LogProbs)
        self._answers = {k: v for k, v in self._answers.items() if not isinstance(v, again)}
        if self.trainer is not None:
            await self.run_in_thread(self.trainer.zero_grad)
        return None

    async def _handshake(self, link: Link) -> None:
        hello = functools.partial(
            self.hello, **asdict(self.state), version=self._manifest.version, digest=self._manifest.digest,
            weights=self.weights(),
        )  # fmt: skip
        await handshake.join(link, handshake.TRAINER, self.secret, hello)

    async def _serve(self, link: Link) -> None:
        requests: asyncio.Queue[object] = asyncio.Queue()

        async def read() -> None:
            while True:  # also while the thread works, so that the link's pings are answered
                requests.put_nowait(await link.receive())

        reading = asyncio.create_task(read())
        try:
            while True:
                getting = asyncio.create_task(requests.get())
                await asyncio.wait([getting, reading], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    reading.result()
                try:
                    reply = await self._perform(getting.result())
                except Exception as e:  # fault boundary: the controller reports it, and this process ends
                    final = isinstance(e, WindfallError)
                    await link.send(m.Failed(error=str(e) if final else errors.last_line(e), final=final))
                    raise
                if reply is not None:
                    await link.send(reply)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _perform(self, request: object) -> object:
        """Perform a verb once. One that was performed and arrives again, because its answer was lost, gets the same
        answer, until the gradients that it belongs to were dropped, or used by an earlier update than the last. None:
        no answer."""
        if isinstance(request, m.UploadAgain):
            return await self.run_in_thread(self.upload_again, request.files)
        if not isinstance(request, m.Verb):
            raise LinkClosed(f"unexpected message: {type(request).__name__}")
        if (answer := self._answers.get(request.id) or self._used_answers.get(request.id)) is not None:
            return answer
        self._answers[request.id] = answer = await self._perform_once(request)
        if isinstance(request, m.OptimStep):
            self._used_answers, self._answers = self._answers, {}
        return answer

    async def _perform_once(self, request: m.Verb) -> object:
        started = time.monotonic()
        match request:
            case m.Forward():
                scored = await self.run_in_thread(self._trained.forward, list(request.samples), request.loss, room=True)
                return m.LogProbs(old=tuple(np.asarray(s.old, np.float64) for s in scored))
            case m.ForwardBackward():
                work, samples = self._trained.forward_backward, list(request.samples)
                tokens = sum(len(sample.ids) for sample in samples)
                logprobs = await self.run_in_thread(work, samples, request.loss, room=True, tokens=tokens)
                return m.GradientAdded(s=time.monotonic() - started, logprobs=tuple(logprobs))
            case m.OptimStep():
                self._updates += 1  # until a version is published, the weights belong to none
                self._early = None
                report = await self.run_in_thread(self._update, request.adam, room=True)
                if request.step is not None:
                    self._completed = CheckpointState.of(request)
                return m.Optimized(report=asdict(report))
            case m.Publish():
                return await self._publish(request)
            case m.Save():
                return m.Saved(path=str(await self.run_in_thread(self.save, self.state)))
            case m.LoadCheckpoint():
                self._updates += 1
                self._completed = await self.run_in_thread(self.load, request.path, room=True)
                return await self._publish()
            case _:
                what = f"a {type(request).__name__} is for slots"
                raise WindfallError(what, where="policies", fix="Make this policy a slot.")

    async def _publish(self, order: m.Publish = NO_WISHES) -> m.PublishedVersion:
        """Publish the weights of the completed step."""
        if self._completed is None and self._early is not None:
            return self._early
        if self.copies:
            self._completed = self.state
        if self._completed is None:
            raise LinkClosed("nothing to publish: no step was completed since the last version")
        self._manifest = await self.run_in_thread(self.publish, self._completed.step, order)
        self.state, self._completed, self._updates = replace(self._completed, step=self._manifest.version), None, 0
        return m.PublishedVersion(version=self._manifest.version, digest=self._manifest.digest, weights=self.weights())

    def _update(self, adam: Adam | None) -> Report:
        self.engine.invalidate()
        return self._trained.optim_step(adam)

    @property
    def _trained(self) -> Trainer:
        if self.trainer is None:
            raise WindfallError("this policy is not trained", where="policies", fix="Remove frozen or copy_of.")
        return self.trainer

    async def run_in_thread(self, work: Callable[..., Any], *args: Any, room: bool = False, tokens: int = 0) -> Any:
        """The result of the work, which is done in the one thread that does all tensor work, in the trainer's turn.
        A publish ends the turn early, so that the engine continues while a version is hashed. Nothing else overlaps:
        the controller sends its next request after the answer to this one, which contains the digest."""

        def locked() -> Any:
            with self.engine.trainer_works(room=room, tokens=tokens):
                return work(*args)

        return await asyncio.get_running_loop().run_in_executor(self._threads, locked)


async def run_beside(services: Sequence[Coroutine[Any, Any, int]], engine: Coroutine[Any, Any, None]) -> int:
    """The result of the service that ends first: the others end with it. An error of the trainer's own engine ends all,
    because the controller would wait for its work."""
    running, local = [asyncio.create_task(each) for each in services], asyncio.create_task(engine)
    try:
        done, _ = await asyncio.wait([*running, local], return_when=asyncio.FIRST_COMPLETED)
        if done == {local}:
            local.result()
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        return next(each for each in running if each in done).result()
    finally:
        for task in (*running, local):
            task.cancel()
        await asyncio.wait([*running, local])
