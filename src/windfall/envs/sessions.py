"""Environments with state. A session is opened for a task, stepped with the policy's texts, and closed.

    env.open(task) ──▶ session.step(text) ──▶ Feedback(observation) ──▶ session.step(text) ──▶ ... ──▶ Feedback(reward)
                                                                                          session.close() ◀──┘

All methods may be plain functions or `async def`. Sessions run in child processes (process_pool/), many at once. The
time limit of a step counts from when it begins to run; time in a queue does not count.

The rest of windfall asks for feedback on all turns of a response. `Stateful` answers with an open session that has had
exactly the turns before the last one. So a session is a cache: it can be lost at any time, because its process ends or
the controller is killed, and is restored by a replay of the policy's texts into a fresh one. Rules:

- A session that raised, was canceled or gave an end is closed and never used again.
- In a replay, every observation and the role that it is for must be the same as before. If one differs, or the
  environment is not replayable, the call fails, and the reward is missing, never zero.
- Responses with the same turns so far may exchange their sessions: nothing that was said tells them apart.

A session is *busy* while it makes a step, and *idle* while it waits for the next turn of its response. The environment
holds something for both, such as a container, so their sum is limited (`OpenSessions`):

- At the limit, a session can only be opened after another one has ended. Calls that open one wait, and that time counts
  against no time limit. Turns of open sessions never wait for this.
- While calls wait, the session that has been idle longest is closed once it has been idle for YIELD_S, if it can be
  replayed. Closing it at once would let two responses replay their sessions against each other, turn by turn.
- A session that is idle for IDLE_S is closed in any case: its response was lost.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from windfall.envs import failures
from windfall.envs.failures import EnvFailed
from windfall.types import Feedback, Task, Turn

Place = TypeVar("Place")
Key = tuple[Any, ...]
"""A session: the id of its task, and its turns so far, each as (text, observation)."""

YIELD_S = 30.0
"""A session must be idle for this long before it is closed to make room for another one (seconds)."""
IDLE_S = 3600.0


class Session(Protocol):
    def step(self, text: str) -> Feedback | Awaitable[Feedback]:
        """Take the policy's text of one turn: a reward ends the session, an observation asks for one more turn. A
        reward that comes with an observation counts only if the response has no tokens left for another turn. The text
        is of the role that the last feedback named, or else of the one before."""
        ...

    def close(self) -> Awaitable[None] | None:
        """Free what the session holds. Not called if the process of the session is killed."""
        ...


class SessionEnv(Protocol):
    """An environment with sessions. A class attribute `replayable = False` says that the same texts may not give the
    same observations: a session that is lost then makes its response missing."""

    def task(self, index: int) -> Task | Awaitable[Task]:
        """Task number `index` (0, 1, 2, ... without end). The same number gives the same task in every process."""
        ...

    def open(self, task: Task) -> Session | Awaitable[Session]: ...


class Stateful:
    """An Env of an environment with sessions. It must be used from one event loop. Its caller closes sessions that
    are not continued (`end_session`, `close`)."""

    stateful = True
    """Calls for the turns of a session should go to the process that has it."""

    def __init__(self, env: SessionEnv) -> None:
        self.env = env
        self.name = type(env).__name__
        self.task = env.task
        self.replayable = bool(getattr(env, "replayable", True))
        self._idle: dict[Key, list[Session]] = {}
        self.replayed_turns = 0
        """Number of turns that were stepped again because their session was gone."""

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        before = tuple((turn.text, turn.observation) for turn in turns[:-1])
        session = self._take((task.id, *before)) if before else None
        if session is None:
            session = await self._restore(task, turns)
        feedback = await self._step(session, turns[-1].text)
        if failures.feedback_fault(feedback) or feedback.observation is None:
            await _call(session.close)
        else:
            self._idle.setdefault((task.id, *before, (turns[-1].text, feedback.observation)), []).append(session)
        return feedback

    async def _restore(self, task: Task, turns: Sequence[Turn]) -> Session:
        gone, before = f"the session of task '{task.id}' is gone", turns[:-1]
        if before and not self.replayable:
            what = f"{gone} after {len(before)} turns, and {self.name} cannot replay it"
            raise EnvFailed(what, "a lost session that cannot be replayed", final=True)
        session = await _call(self.env.open, task)
        for number, (turn, later) in enumerate(pairwise(turns), start=1):
            self.replayed_turns += 1
            feedback = await self._step(session, turn.text)
            asked = (feedback.observation, feedback.role or turn.role)
            if asked != (turn.observation, later.role):
                await _call(session.close)
                differs = f"{_short(feedback.observation)} instead of {_short(turn.observation)}"
                if feedback.observation == turn.observation:
                    differs = f"it is for the role {asked[1]!r} instead of {later.role!r}"
                what = f"{gone}, and a replay differs in turn {number}: {differs}"
                raise EnvFailed(what, "a replay that differs", final=True)
        return session

    async def _step(self, session: Session, text: str) -> Feedback:
        """Step a session. If it does not answer, it is closed: its state is unknown."""
        answered = False
        try:
            feedback = await _call(session.step, text)
            answered = True
        finally:
            if not answered:
                await _call(session.close)
        return feedback

    def _take(self, key: Key) -> Session | None:
        found = self._idle.get(key)
        session = found.pop() if found else None
        if not found:
            self._idle.pop(key, None)
        return session

    async def end_session(self, key: Key) -> None:
        """No further turn follows these: close their session, if it is here."""
        if (session := self._take(key)) is not None:
            await _call(session.close)

    async def close(self) -> None:
        """Close all sessions that wait for their next turn. One that raises does not keep the others open."""
        idle = [session for found in self._idle.values() for session in found]
        self._idle = {}
        await asyncio.gather(*(_call(session.close) for session in idle), return_exceptions=True)

    @property
    def idle(self) -> int:
        return sum(map(len, self._idle.values()))


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    value = function(*args)
    return await value if inspect.isawaitable(value) else value


def _short(text: str | None, limit: int = 80) -> str:
    return "an end" if text is None else repr(text if len(text) <= limit else f"{text[:limit]}...")


class OpenSessions(Generic[Place]):
    """The idle sessions. `busy` tells how many others are open.

    >>> now, sessions = [0.0], OpenSessions(2, clock=lambda: now[0])
    >>> sessions.keep((7, ("north", "a wall")), "process 1")
    >>> sessions.has_room(busy=1), sessions.has_room(busy=0)
    (False, True)
    >>> sessions.make_room(busy=1)
    >>> now[0] = 60.0
    >>> sessions.make_room(busy=1)
    ((7, ('north', 'a wall')), 'process 1')
    >>> sessions.take((7, ("north", "a wall")))
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.replayable = True
        self._clock = clock
        self._idle: OrderedDict[int, tuple[Key, Place, float]] = OrderedDict()
        self._by_key: dict[Key, list[int]] = {}
        self._counts: Counter[int] = Counter()
        self._next = 0

    def __len__(self) -> int:
        return len(self._idle)

    def keep(self, key: Key, place: Place) -> None:
        self._next += 1
        self._idle[self._next] = (key, place, self._clock())
        self._by_key.setdefault(key, []).append(self._next)
        self._counts[id(place)] += 1

    def take(self, key: Key) -> Place | None:
        """Where a session with these turns waits. It is not idle any more."""
        return self._remove(self._by_key[key][-1])[1] if key in self._by_key else None

    def drop(self, place: Place) -> None:
        for number in [number for number, (_, where, _) in self._idle.items() if where is place]:
            self._remove(number)

    def count(self, place: Place) -> int:
        return self._counts[id(place)]

    def has_room(self, busy: int) -> bool:
        return len(self._idle) + busy < self.limit

    def make_room(self, busy: int) -> tuple[Key, Place] | None:
        """The session to close because a call waits for room, if there is one."""
        return None if self.has_room(busy) or not self.replayable else self.oldest(YIELD_S)

    def expire(self) -> tuple[Key, Place] | None:
        return self.oldest(IDLE_S)

    def oldest(self, idle_s: float) -> tuple[Key, Place] | None:
        """The session that has been idle longest, if that is at least `idle_s`. It is not idle any more."""
        number = next(iter(self._idle), 0)
        return self._remove(number) if number and self._clock() - self._idle[number][2] >= idle_s else None

    def _remove(self, number: int) -> tuple[Key, Place]:
        key, place, _ = self._idle.pop(number)
        self._counts[id(place)] -= 1
        self._by_key[key].remove(number)
        if not self._by_key[key]:
            del self._by_key[key]
        return key, place
