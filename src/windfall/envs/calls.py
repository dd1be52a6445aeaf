"""Calls to an environment that runs elsewhere: in child processes (process_pool/), or on servers (remote/).

    task, feedback ──▶ a queue ──▶ a place: a child process or a server ──▶ value or failure
                          ▲                     │
                          └── a place is lost ──┘   calls that were not the cause are sent again

Both kinds of places get the same messages (link/env_messages.py) and give the same answers.

- A turn of a session goes to the place that has it. If that place is lost, it goes to any other one, which replays the
  session or says why it cannot (sessions.py). Calls that would open one session too many wait.
- Time in a queue counts against no time limit.
- What a place sends is checked: it may be anyone's code.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import msgspec

from windfall.envs.failures import EnvFailed, feedback_fault, task_fault
from windfall.envs.sessions import Key, OpenSessions
from windfall.link import env_messages as e
from windfall.types import Feedback, Task, Turn, prompt_key

MAX_MOVES = 5
"""Number of places that may be lost during a call, for a reason that is not known, before the call fails."""


@dataclass(kw_only=True, eq=False)
class EnvCall:
    message: e.TaskCall | e.FeedbackCall
    name: str
    future: asyncio.Future[Any]
    begin: Callable[[], object]
    home: Any = None
    """The place that has the session of this call, while it waits in a queue."""
    moves: int = 0
    """Number of places that were lost during this call, and it is not known which of their calls was the reason."""
    failed_at: set[Any] = field(default_factory=set)
    """The places that were lost while they had the call. Other servers are preferred."""
    sent_s: float = 0.0
    """When it was sent to its place (monotonic clock, seconds, as all times here)."""
    began_s: float | None = None
    late_s: float | None = None
    """When a child canceled it because it was over its limit."""
    stack: str = ""
    verdict: Feedback | None = None
    """The result if the kernel ends the child because the call used too much CPU time."""

    @property
    def number(self) -> int:
        return self.message.number

    @property
    def session(self) -> Key:
        assert isinstance(self.message, e.FeedbackCall)
        return session_key(self.message)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def succeed(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)


class CallPlace:
    def __init__(self) -> None:
        self.sent: dict[int, EnvCall] = {}
        self.stepping = 0
        """Number of the sent calls that make a step in a session."""

    def send(self, message: Any) -> None:
        raise NotImplementedError

    def end_session(self, key: Key) -> None:
        self.send(e.EndSession(id=key[0], turns=key[1:]))


SomePlace = TypeVar("SomePlace", bound=CallPlace)


class CallHost(Generic[SomePlace]):
    """The EnvHost that both kinds share. A subclass chooses the place of a call and keeps the places running."""

    def __init__(self, name: str, max_sessions: int) -> None:
        self.name = name
        self.needs_tokens = False
        self.stateful = False
        self.sessions: OpenSessions[SomePlace] = OpenSessions(max_sessions)
        self.places: list[SomePlace] = []
        self._next_number = 1
        self._turns: deque[EnvCall] = deque()
        """Calls whose session is open."""
        self._opening: deque[EnvCall] = deque()
        """Calls that open a session."""
        self._pending: deque[EnvCall] = deque()
        """All others."""
        self._dispatching = False

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        return self.call(e.TaskCall(number=0, index=index, limit_s=timeout_s))

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        given = tuple((t.text, t.observation, tuple(t.tokens) if self.needs_tokens else (), t.role) for t in turns)
        crc = zlib.crc32(prompt_key(task.prompt))
        call = self.call(
            e.FeedbackCall(number=0, index=index, id=task.id, prompt_crc=crc, turns=given, limit_s=timeout_s)
        )
        try:
            return await call
        except asyncio.CancelledError:
            # A result that has just arrived may have left a session that waits for a next turn.
            if call.done() and not call.cancelled() and call.exception() is None:
                self.end_session(index, task, [*turns[:-1], replace(turns[-1], observation=call.result().observation)])
            raise

    def end_session(self, index: int, task: Task, turns: Sequence[Turn]) -> None:
        self.end((task.id, *((t.text, t.observation) for t in turns)))

    def end(self, key: Key) -> None:
        """Close a session that waits for its next turn, if there is one with these turns."""
        if self.stateful and (place := self.sessions.take(key)) is not None:
            self._close_session(key, place)

    def call(
        self, message: e.TaskCall | e.FeedbackCall, begin: Callable[[], object] = lambda: None
    ) -> asyncio.Future[Any]:
        """Make a call; its number is set here. `begin` is called when it goes to a place, and again for another one."""
        future = asyncio.get_running_loop().create_future()
        numbered = msgspec.structs.replace(message, number=self._next_number)
        call = EnvCall(message=numbered, name=describe_call(self.name, message), future=future, begin=begin)
        self._next_number += 1
        future.add_done_callback(lambda future: self._cancel(call) if future.cancelled() else None)
        self._enqueue(call)
        return future

    # What a subclass decides.

    def _choose(self, call: EnvCall) -> SomePlace | None:
        """The place for a call that may go to any place; None if none is free."""
        raise NotImplementedError

    def _may_send(self) -> bool:
        return True

    # Queues.

    def _enqueue(self, call: EnvCall, *, first: bool = False) -> None:
        queue = self._pending
        if self._steps(call):
            key = call.session
            call.home = self.sessions.take(key) if len(key) > 1 else None
            queue = self._opening if call.home is None else self._turns
        (queue.appendleft if first else queue.append)(call)
        self._dispatch_soon()

    def _steps(self, call: EnvCall) -> bool:
        return self.stateful and isinstance(call.message, e.FeedbackCall)

    def _cancel(self, call: EnvCall) -> None:
        for place in self.places:
            if call.number in place.sent:
                place.send(e.CancelCall(number=call.number))
        self._dispatch_soon()

    def _queued(self) -> list[EnvCall]:
        return [*self._turns, *self._opening, *self._pending]

    def _clear_queues(self) -> list[EnvCall]:
        calls = self._queued()
        for queue in (self._turns, self._opening, self._pending):
            queue.clear()
        return calls

    def _cancel_all(self) -> None:
        for call in [*self._clear_queues(), *(call for place in self.places for call in place.sent.values())]:
            call.future.cancel()

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        for queue in (self._turns, self._opening, self._pending):
            while queue and self._may_send():
                call = queue[0]
                if call.future.done():  # it was canceled, and nothing else knows of its session
                    queue.popleft()
                    if call.home is not None:
                        call.home.end_session(call.session)
                    continue
                if queue is self._opening and not self.sessions.has_room(self._busy()):
                    break
                place = call.home or self._choose(call)
                if place is None:
                    break
                queue.popleft()
                self._send(call, place)

    def _send(self, call: EnvCall, place: SomePlace) -> None:
        call.home = call.began_s = call.late_s = None
        call.stack = ""
        call.sent_s = time.monotonic()
        place.sent[call.number] = call
        place.stepping += self._steps(call)
        call.begin()
        place.send(call.message)

    def _busy(self) -> int:
        """Number of open sessions that are not idle."""
        return len(self._turns) + sum(place.stepping for place in self.places)

    # Answers and losses.

    def _answered(self, place: SomePlace, call: EnvCall, value: Task | Feedback | EnvFailed) -> None:
        del place.sent[call.number]
        place.stepping -= self._steps(call)
        if isinstance(value, EnvFailed):
            call.fail(value)
        else:
            if self._steps(call) and isinstance(value, Feedback) and value.observation is not None:
                self._keep_session(place, call, value.observation)
            call.succeed(value)
        self._dispatch_soon()

    def _keep_session(self, place: SomePlace, call: EnvCall, observation: str) -> None:
        assert isinstance(call.message, e.FeedbackCall)
        key = (*call.session, (call.message.turns[-1][0], observation))
        if call.future.cancelled():
            self._close_session(key, place)
        else:
            self.sessions.keep(key, place)

    def _suspect(self, calls: Sequence[EnvCall], places: str, how: str, stack: str = "") -> None:
        """One of these calls may be why its place was lost. A call fails if that happens too often."""
        for call in calls:
            call.moves += 1
            if call.moves > MAX_MOVES:
                call.fail(
                    EnvFailed(f"{call.moves} {places} during {call.name}; the last {how}", how, stack, final=True)
                )

    def _lose(self, place: SomePlace) -> None:
        """A place is gone: its calls that have not failed are sent again, before all others."""
        self.sessions.drop(place)
        homeless = [call for call in self._turns if call.home is place]
        for call in homeless:
            self._turns.remove(call)
        for call in reversed([*place.sent.values(), *homeless]):
            if not call.future.done():
                self._enqueue(call, first=True)
        place.sent = {}
        place.stepping = 0
        self._dispatch_soon()

    # Idle sessions.

    def _close_session(self, key: Key, place: SomePlace) -> None:
        place.end_session(key)
        self._dispatch_soon()

    def _close_old_sessions(self) -> None:
        """Close sessions whose next turn does not come, and one that can be replayed if a call waits for its room."""
        while found := self.sessions.expire() or (self.sessions.make_room(self._busy()) if self._opening else None):
            self._close_session(*found)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """If a task of the host fails because of a bug in windfall, all calls must fail: they must not wait forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for call in [*self._queued(), *(call for place in self.places for call in place.sent.values())]:
                call.fail(RuntimeError(f"the host of the environment failed: {error!r}"))
            raise error


def describe_call(env: str, message: e.TaskCall | e.FeedbackCall) -> str:
    if isinstance(message, e.TaskCall):
        return f"{env}.task({message.index})"
    return f"{env}.feedback of task '{message.id}'"


def session_key(message: e.FeedbackCall) -> Key:
    return (message.id, *(turn[:2] for turn in message.turns[:-1]))


def answer_message(number: int, value: Task | Feedback | EnvFailed) -> e.TaskMade | e.CallGraded | e.CallFailed:
    """The answer to a call. Texts and numbers of other libraries become plain ones."""
    if isinstance(value, EnvFailed):
        texts = (text.encode(errors="replace").decode() for text in (value.error, value.cause, value.traceback))
        what, cause, traceback = texts
        return e.CallFailed(number=number, error=what, cause=cause, traceback=traceback, final=value.final)
    if isinstance(value, Task):
        if isinstance(value.prompt, str):
            return e.TaskMade(number=number, id=str(value.id), prompt=str(value.prompt), role=str(value.role))
        messages = [
            {key: str(part) if isinstance(part, str) else part for key, part in message.items()}
            for message in value.prompt
        ]
        return e.TaskMade(number=number, id=str(value.id), prompt=messages, role=str(value.role))
    return e.CallGraded(
        number=number,
        reward=None if value.reward is None else float(value.reward),
        observation=None if value.observation is None else str(value.observation),
        scores=tuple((str(name), float(score)) for name, score in value.scores),
        role=str(value.role),
        rewards=tuple((str(role), float(reward)) for role, reward in value.rewards.items()),
    )


def parse_answer(call: EnvCall, message: Any) -> Task | Feedback | EnvFailed:
    """The value in an answer. Raises ValueError if it does not answer the call."""
    if isinstance(message, e.CallFailed):
        return EnvFailed(message.error, message.cause, message.traceback, final=message.final)
    value: Task | Feedback
    if isinstance(message, e.TaskMade) and isinstance(call.message, e.TaskCall):
        value = Task(id=message.id, prompt=message.prompt, role=message.role)
    elif isinstance(message, e.CallGraded) and isinstance(call.message, e.FeedbackCall):
        value = Feedback(
            reward=message.reward,
            observation=message.observation,
            scores=message.scores,
            role=message.role,
            rewards=dict(message.rewards),
        )
    else:
        raise ValueError(f"a {type(message).__name__} does not answer {call.name}")
    if fault := task_fault(value) if isinstance(value, Task) else feedback_fault(value):
        raise ValueError(f"a wrong answer: {fault}")
    return value
