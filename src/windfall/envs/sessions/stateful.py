"""Makes an Env of an environment with sessions: the rest of windfall asks for feedback on all turns, and an open
session that has had exactly these turns is continued with the last one.

    feedback(task, turns) ──▶ an idle session with the turns before the last? ── yes ──▶ step(last text)
                                        │ no
                                        └──▶ open a fresh session, replay the turns before the last, then step

So a session is a cache: any session can be lost or closed early, and is restored by a replay. Rules:
- A session that raised, was canceled or gave an end is closed and never used again.
- In a replay, every observation must be the same as before. If one differs, or the environment is not replayable, the
  call fails, and the reward is missing, never zero.
- Responses with the same turns so far may exchange their sessions: nothing that was said tells them apart.
- At most `max_idle` sessions wait for their next turn. Beyond that, and after `idle_s`, the one that has waited longest
  is closed. Sessions of an environment that is not replayable are only closed after `idle_s`. A timer sees to it, so a
  session of a response that ran out of tokens or was withdrawn is closed although its next turn never comes.
- The pool of processes limits the open sessions of all its processes together (open_sessions.py).
- `end_session` closes the session of a response that ran out of tokens or was dropped.
- `close` closes all sessions that wait. The pool of processes calls it when the run ends.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

from windfall.envs import failures
from windfall.envs.failures import EnvFailed
from windfall.envs.sessions.base import History, Session, SessionEnv, history_of
from windfall.envs.sessions.open_sessions import OpenSessions
from windfall.types import Feedback, Task, Turn

MAX_IDLE = 4096
"""Default number of sessions that may wait for their next turn in one process."""
IDLE_S = 3600.0
"""Default time after which a session that waits for its next turn is closed (seconds)."""


class Stateful:
    """An Env. It must be used from one event loop."""

    stateful = True
    """Calls for the turns of a session should go to the process that has it."""

    def __init__(
        self,
        env: SessionEnv,
        *,
        max_idle: int = MAX_IDLE,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.env = env
        self._max_idle = max_idle
        self._idle_s = idle_s
        self.task = env.task
        self.replayable = bool(getattr(env, "replayable", True))
        self._idle: OpenSessions[Session] = OpenSessions(max_idle, clock=clock)
        """Those that wait for their next turn."""
        self._timer: asyncio.TimerHandle | None = None
        self._closing: asyncio.Task[None] | None = None
        self.replayed_turns = 0
        """Number of turns that were stepped again because their session was gone."""

    @property
    def name(self) -> str:
        return type(self.env).__name__

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        before = history_of(turns[:-1])
        await self._close_old()
        session = self._take((task.id, before))
        if session is None:
            session = await self._restore(task, before)
        feedback = await self._step(session, turns[-1].text)
        if failures.feedback_fault(feedback) or feedback.observation is None:
            await _call(session.close)
        else:
            self._keep((task.id, (*before, (turns[-1].text, feedback.observation))), session)
        return feedback

    async def _restore(self, task: Task, before: History) -> Session:
        if before and not self.replayable:
            raise EnvFailed(
                f"the session of task '{task.id}' is gone after {len(before)} turns, and {self.name} cannot replay it",
                "a lost session that cannot be replayed",
                final=True,
            )
        session = await _call(self.env.open, task)
        for number, (text, observation) in enumerate(before, start=1):
            self.replayed_turns += 1
            feedback = await self._step(session, text)
            if feedback.observation != observation:
                await _call(session.close)
                raise EnvFailed(
                    f"the session of task '{task.id}' is gone, and a replay differs in turn {number}: "
                    f"{_short(feedback.observation)} instead of {_short(observation)}",
                    "a replay that differs",
                    final=True,
                )
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

    def _keep(self, key: tuple[str, History], session: Session) -> None:
        self._idle.keep(key, session)
        self._set_timer()

    def _set_timer(self) -> None:
        """Have sessions closed that wait for too long, also if no other call arrives."""
        if self._timer is None and len(self._idle):
            self._timer = asyncio.get_running_loop().call_later(self._idle_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._closing = asyncio.get_running_loop().create_task(self._close_old())
        self._closing.add_done_callback(
            lambda task: None if task.cancelled() else (task.exception(), self._set_timer())
        )

    async def end_session(self, task_id: str, history: History) -> None:
        """No further turn follows these: close their session, if it is here."""
        if (session := self._take((task_id, history))) is not None:
            await _call(session.close)

    async def close(self) -> None:
        """Close all sessions that wait for their next turn. One that raises does not keep the others open."""
        idle: list[Session] = []
        while (found := self._idle.oldest(0.0)) is not None:
            idle.append(found[1])
        await asyncio.gather(*(_call_in_task(session.close) for session in idle), return_exceptions=True)

    def _take(self, key: tuple[str, History]) -> Session | None:
        return self._idle.take(key) if key[1] else None

    async def _close_old(self) -> None:
        while True:
            too_many = len(self._idle) > self._max_idle and self.replayable
            found = self._idle.oldest(0.0 if too_many else self._idle_s)
            if found is None:
                return
            await _call(found[1].close)

    @property
    def idle(self) -> int:
        """Number of sessions that wait for their next turn."""
        return len(self._idle)


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    value = function(*args)
    return await value if inspect.isawaitable(value) else value


async def _call_in_task(function: Callable[..., Any]) -> None:
    await _call(function)


def _short(text: str | None, limit: int = 80) -> str:
    return "an end" if text is None else repr(text if len(text) <= limit else f"{text[:limit]}...")
