"""A whole fleet in one event loop that runs in virtual time and can be stopped between any two of its callbacks.

Everything is the product's (Rollout, Dispatch, Journal, Session, Host, links in memory) except three things: the loop's
clock, the engine (its tokens are a hash of seed and context), and the engine's thread, whose steps the loop takes
itself. So a run is the same every time, callback by callback, and "lose a worker at callback k" means one moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashing import Asking, Hashing, Words
from step_loop import StepLoop

from windfall.config import RolloutSection as Options
from windfall.envs.in_process import InProcess
from windfall.events.log import EventLog
from windfall.ledger.journal import Journal
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.memory import MemoryLink, pair
from windfall.rollout.assignment import Offer
from windfall.rollout.dispatch import Dispatch
from windfall.rollout.groups import Rollout
from windfall.scheduling.members import Member, WorkerState
from windfall.scheduling.rebalance import Move
from windfall.types import Lease, Response, Sampling
from windfall.worker.engine_thread import EngineThread
from windfall.worker.in_process import weights_already_loaded
from windfall.worker.session import Session

TASKS = (0, 1, 2, 3)
SIZE = 2
MOST_CALLBACKS = 200_000


class _Bell(queue.SimpleQueue[Any]):
    """Orders for a host, and something that hears them."""

    heard: Callable[[], None] = staticmethod(lambda: None)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        self.heard()


class LoopHost(EngineThread):
    """The product's host without its thread."""

    def __init__(self, engine: Any, slots: int, step_s: float) -> None:
        super().__init__(engine, slots)
        self._step_s, self._wake = step_s, asyncio.Event()
        bell = self._orders = _Bell()
        bell.heard = self._wake.set

    async def live(self, awake: asyncio.Event) -> None:
        while True:
            await awake.wait()
            self._obey()
            if self._paused or not len(self.engine):
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(self._step_s)
            self._obey()
            if awake.is_set() and not self._paused and len(self.engine):
                self._step()

    def _obey(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                assert order is not None
                order()


class _Valve:
    """A link that stands still while the worker is frozen."""

    def __init__(self, link: MemoryLink, awake: asyncio.Event) -> None:
        self.peer, self._link, self._awake = link.peer, link, awake

    async def send(self, message: object) -> None:
        await self._awake.wait()
        await self._link.send(message)

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
        session = Session(_Valve(self._theirs, self.awake), host, weights_already_loaded, heartbeat_s=0.5)
        hello = m.Hello(protocol=m.PROTOCOL, nonce=b"", proof=b"", name=name, lease=Lease())
        self._before = set(crew.dispatch.members.all)
        self.attended = asyncio.create_task(crew.dispatch.attend(self._ours, hello))
        self.work = [asyncio.create_task(session.serve()), asyncio.create_task(host.live(self.awake))]

    @property
    def member(self) -> Member | None:
        """As the controller knows it."""
        return next(
            (w for id, w in self.crew.dispatch.members.all.items() if w.name == self.name and id not in self._before),
            None,
        )

    def kill(self, *, lossy: bool = False) -> None:
        """As SIGKILL: nothing more is made or sent, and the link ends. `lossy`: what was on its way is gone, too."""
        for task in self.work:
            task.cancel()
        self._theirs._wire.why = "killed"
        self._theirs._wire.cut.set()
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
    env: Asking
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
        held = {e.worker for e in self.dispatch.ledger.entries.values() if e.place == "running"}
        here = {w.id for w in self.dispatch.members.here()}
        assert held <= here, f"{held - here} are gone and hold responses"

    async def roll(self) -> None:
        for name in ("a", "b", "c"):
            self.hire(name)
        watching = asyncio.create_task(self.dispatch.watch())
        try:
            async with asyncio.timeout(600):  # virtual
                async for g in self.rollout.groups(TASKS, size=SIZE, sampling=Sampling()):
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
"""Called between any two callbacks of the loop, once the workers are there."""


def roll(
    folder: Path, moment: Moment = lambda crew: None, *, journal: Path | None = None, check_from: int = 0,
    max_tokens: int = 24, stop: frozenset[int] = Words.stop,
) -> Crew:  # fmt: skip
    """One rollout, from its first callback to its last group; the rules are checked between any two callbacks
    (`check_from` this one on: what comes before is the same in every run)."""
    with asyncio.Runner(loop_factory=StepLoop) as runner:
        loop: Any = runner.get_loop()

        async def main() -> Crew:
            events = EventLog(folder / "events.jsonl")
            written = Journal(journal, "settings") if journal else None
            dispatch, env, text = Dispatch(events=events, journal=written), Asking(), Words()
            options = Options(max_tokens=max_tokens, reward_tries=2, reward_timeout_s=20.0)
            rollout = Rollout(dispatch, InProcess(env), text, options, seed=3, events=events)  # pyright: ignore
            crew = Crew(dispatch=dispatch, rollout=rollout, env=env, loop=loop)
            text.stop = stop
            if written is not None:
                rollout.past = written.begin(0)
            dispatch.set_offer(Offer(version=0, digest="d0", url=""))

            def between() -> None:
                if not crew.hands:
                    return
                crew.callbacks += 1
                assert crew.callbacks < MOST_CALLBACKS, "the rollout does not come to an end"
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

        try:
            crew = runner.run(main())
        finally:
            loop.between(None)
    assert not loop.errors, loop.errors
    return crew


@dataclass
class Once:
    """A Moment: does `then` the first time that `when` holds."""

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
    """In place of `rebalance`: whoever stands idle gets half of what the busiest has, whether that pays or not."""
    idle = [load for load in loads if load.running == 0]
    busy = max(loads, key=lambda load: load.running)
    if not idle or busy.running < 2:
        return []
    some = sorted(held(busy.worker), key=lambda r: r.context)[: busy.running // 2]
    return [Move(id=r.id, source=busy.worker, target=idle[0].worker, gain_s=1.0, cost_s=0.0) for r in some]
