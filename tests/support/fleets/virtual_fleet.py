"""A whole fleet in one event loop that runs in virtual time and can be interrupted between any two callbacks.

Everything is product code (Rollout, Dispatch, Journal, WorkerLink, EngineThread, links in memory) except three things:
the clock of the loop, the engine (its tokens are a hash of seed and context), and the thread of the engine, whose steps
run in the loop. Therefore a run is the same every time, callback by callback, and "lose a worker at callback k" is one
moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.engines.hashing_engine import CharacterText, Hashing, MultiTurnEnv
from tests.support.fleets.virtual_loop import StepLoop
from windfall.controller.ledger.journal import Journal
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stream import Rollout
from windfall.controller.scheduling.balance import Move
from windfall.controller.workers.members import Member, WorkerState
from windfall.controller.workers.versions import Offer
from windfall.engine.engine_thread import EngineThread
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.memory import MemoryLink, pair
from windfall.recipe.sections import Recipe
from windfall.recipe.sections import RolloutSection as Options
from windfall.run.commands.in_process import weights_already_loaded
from windfall.types import Lease, Response, Sampling
from windfall.worker.worker_link import WorkerLink

TASKS = (0, 1, 2, 3)
SIZE = 2
MAX_CALLBACKS = 200_000


class _NotifyingQueue(queue.SimpleQueue[Any]):
    """Orders for an engine; `on_put` is called after each."""

    on_put: Callable[[], None] = staticmethod(lambda: None)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.on_put()


class LoopHost(EngineThread):
    """EngineThread without its thread: the event loop runs the steps."""

    def __init__(self, engine: Any, slots: int, step_s: float) -> None:
        super().__init__(engine, slots)
        self._step_s, self._wake = step_s, asyncio.Event()
        orders = self._orders = _NotifyingQueue()
        orders.on_put = self._wake.set

    async def live(self, awake: asyncio.Event) -> None:
        while True:
            await awake.wait()
            self._run_orders()
            if self._paused or not len(self.engine):
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(self._step_s)
            self._run_orders()
            if awake.is_set() and not self._paused and len(self.engine):
                self._step()

    def _run_orders(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                assert order is not None
                order()


class _FreezableLink:
    """A link that carries nothing while the worker is frozen."""

    def __init__(self, link: MemoryLink, awake: asyncio.Event) -> None:
        self.peer, self._link, self._awake = link.peer, link, awake

    async def send(self, message: object) -> None:
        await self._awake.wait()
        await self._link.send(message)

    def authenticated(self) -> None: ...

    async def receive(self) -> object:
        await self._awake.wait()
        message = await self._link.receive()
        await self._awake.wait()
        return message

    async def close(self, why: str = "") -> None:
        await self._link.close(why)


class Hand:
    """One worker."""

    def __init__(self, crew: Crew, name: str, slots: int) -> None:
        self.crew, self.name = crew, name
        self._ours, self._theirs = pair("controller", name)
        self.awake = asyncio.Event()
        self.awake.set()
        self.engine = Hashing(crew.made)
        host = LoopHost(self.engine, slots, crew.step_s)
        session = WorkerLink(_FreezableLink(self._theirs, self.awake), host, weights_already_loaded, heartbeat_s=0.5)
        hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name, lease=Lease())
        self._before = set(crew.dispatch.members.all)
        self.attended = asyncio.create_task(crew.dispatch.attend(self._ours, hello))
        self.work = [asyncio.create_task(session.serve()), asyncio.create_task(host.live(self.awake))]

    @property
    def member(self) -> Member | None:
        """The worker as the controller sees it."""
        return next(
            (w for id, w in self.crew.dispatch.members.all.items() if w.name == self.name and id not in self._before),
            None,
        )

    def kill(self, *, lossy: bool = False) -> None:
        """Like SIGKILL: nothing more is generated or sent, and the link closes. `lossy`: frames on the way are lost."""
        for task in self.work:
            task.cancel()
        self._theirs._shared.why = "killed"
        self._theirs._shared.closed.set()
        while lossy and not self._ours._inbox.empty():
            self._ours._inbox.get_nowait()

    def freeze(self) -> None:
        self.awake.clear()

    def thaw(self) -> None:
        self.awake.set()


@dataclass(kw_only=True)
class Crew:
    """The controller's side and its workers, for one rollout of TASKS."""

    dispatch: Dispatch
    rollout: Rollout
    env: Any
    loop: StepLoop
    made: Counter[tuple[int, int]] = field(default_factory=Counter)
    hands: list[Hand] = field(default_factory=list)
    groups: dict[int, tuple[Response, ...]] = field(default_factory=dict)
    callbacks: int = 0
    step_s: float = 0.02
    main: asyncio.Task[None] | None = None

    def hire(self, name: str, slots: int = 8) -> Hand:
        self.hands.append(Hand(self, name, slots))
        return self.hands[-1]

    @property
    def responses(self) -> dict[str, Response]:
        return {r.id: r for rows in self.groups.values() for r in rows}

    def check(self) -> None:
        self.dispatch.ledger.check()
        self.dispatch.members.check()
        held = {e.worker for e in self.dispatch.ledger.entries.values() if e.state == "running"}
        here = {w.id for w in self.dispatch.members.here()}
        assert held <= here, f"{held - here} are gone but hold responses"

    async def roll(self) -> None:
        for name in ("a", "b", "c"):
            self.hire(name)
        watching = asyncio.create_task(self.dispatch.watch())
        try:
            async with asyncio.timeout(600):  # virtual
                async for g in self.rollout.groups(TASKS, size=SIZE, sampling=lambda policy: Sampling()):
                    self.groups[g.index] = g.responses
        finally:
            self.loop.between(None)
            watching.cancel()
            for hand in self.hands:
                hand.kill()
            work = [t for hand in self.hands for t in hand.work]
            ended = await asyncio.gather(watching, *work, return_exceptions=True)
            attended = await asyncio.gather(*(hand.attended for hand in self.hands), return_exceptions=True)
        wrong = [e for e in ended if e and not isinstance(e, str | LinkClosed | asyncio.CancelledError)]
        wrong += [e for e in attended if e]
        assert not wrong, wrong


Moment = Callable[[Crew], object]
"""Called between any two callbacks of the loop, once there are workers."""


def roll(
    folder: Path, moment: Moment = lambda crew: None, *, journal: Path | None = None, check_from: int = 0,
    max_tokens: int = 24, stop: frozenset[int] = CharacterText.stop, make_env: Callable[[], Any] = MultiTurnEnv,
) -> Crew:  # fmt: skip
    """Run one rollout, from its first callback to its last group. The rules are checked between any two callbacks,
    beginning with `check_from`: what comes before is the same in every run."""
    with asyncio.Runner(loop_factory=StepLoop) as runner:
        loop: Any = runner.get_loop()

        async def main() -> Crew:
            events = EventLog(folder / "events.jsonl")
            written = Journal(journal, "settings") if journal else None
            dispatch, env, text = Dispatch(events=events, journal=written), make_env(), CharacterText()
            texts: Any = {"": text}
            options = Options(max_tokens=max_tokens, reward_tries=2, reward_timeout_s=20.0)
            rollout = Rollout(dispatch, InProcess(env), texts, Recipe(rollout=options), seed=3, events=events)
            crew = Crew(dispatch=dispatch, rollout=rollout, env=env, loop=loop)
            text.stop = stop
            if written is not None:
                rollout.history = written.open(0)
            dispatch.set_offer(Offer(version=0, digest="d0"))

            def between() -> None:
                if not crew.hands:
                    return
                crew.callbacks += 1
                assert crew.callbacks < MAX_CALLBACKS, "the rollout does not end"
                if crew.callbacks >= check_from:
                    crew.check()
                moment(crew)

            loop.between(between)
            crew.main = asyncio.create_task(crew.roll())
            try:
                await asyncio.wait([crew.main])
                if not crew.main.cancelled():
                    crew.main.result()
            finally:
                loop.between(None)
                events.close()
                if written is not None:
                    written.close()
            return crew

        gc.disable()  # a collection may close coroutines of other tests, and their last acts would run in this loop
        try:
            crew = runner.run(main())
        finally:
            gc.enable()
            loop.between(None)
    assert not loop.errors, loop.errors
    return crew


@dataclass
class Once:
    """A Moment that calls `then` the first time `when` holds."""

    when: Callable[[Crew], object]
    then: Callable[[Crew], object]
    happened: bool = False

    def __call__(self, crew: Crew) -> None:
        if not self.happened and self.when(crew):
            self.happened = True
            self.then(crew)


def at(callback: int, then: Callable[[Crew], object]) -> Once:
    return Once(lambda crew: crew.callbacks >= callback, then)


def state_of(hand: Hand) -> WorkerState | None:
    return hand.member.state if hand.member else None


def later(crew: Crew, delay_s: float, call: Callable[[], object]) -> None:
    crew.loop.call_later(delay_s, call)


def relieve(loads: Any, held: Any, **_: Any) -> list[Any]:
    """Replaces `rebalance`: an idle worker gets half of the busiest worker's responses, whether that pays or not."""
    idle = [load for load in loads if load.running == 0]
    busy = max(loads, key=lambda load: load.running)
    if not idle or busy.running < 2:
        return []
    some = sorted(held(busy.worker), key=lambda r: r.context)[: busy.running // 2]
    return [Move(id=r.id, source=busy.worker, target=idle[0].worker, gain_s=1.0, cost_s=0.0) for r in some]
