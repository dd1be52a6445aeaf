"""A call to an environment in another process, the calls that wait for one, and what is known about a child process."""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from windfall.envs.failures import EnvFailed, feedback_fault, task_fault
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.envs.sessions.base import answered
from windfall.envs.sessions.open_sessions import Key
from windfall.types import Feedback, Task, Turn, prompt_key

SomeCall = TypeVar("SomeCall", bound="EnvCall")

MAX_WAITING = 1024
"""Maximum number of waiting `async def` calls in one child."""


@dataclass(kw_only=True, eq=False)
class EnvCall:
    number: int
    what: str
    """The method: "task" or "feedback"."""
    args: tuple[Any, ...]
    limit_s: float
    name: str
    """Names this call in error messages."""
    future: asyncio.Future[Any]
    verdict: Feedback | None = None
    """The result if the kernel ends the child because the call used too much CPU time."""
    late_s: float | None = None
    """When the child canceled the call because it was over its limit (monotonic clock, seconds)."""
    stack: str = ""
    """The stack of the call at that moment."""
    moves: int = 0
    """Number of children that ended during this call, and it is not known which of their calls was the reason."""
    begin: Callable[[], object] = lambda: None
    """Called when the call goes to a child."""

    @property
    def room(self) -> int:
        """Upper limit for the calls in the same child, this one included: 64 after the first move, 4, then 1."""
        return max(1, MAX_WAITING >> 4 * self.moves) if self.moves else sys.maxsize

    @property
    def session(self) -> Key:
        """The session that the last turn of this call for feedback continues."""
        return (self.args[1], *(tuple(turn[:2]) for turn in self.args[3][:-1]))

    def session_after(self, value: object) -> Key | None:
        """The session that waits for its next turn after feedback with this value; None if there is none."""
        if not isinstance(value, Feedback) or value.observation is None:
            return None
        return (*self.session, (self.args[3][-1][0], value.observation))

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def succeed(self, value: Any) -> None:
        if not self.future.done():
            self.future.set_result(value)


@dataclass(eq=False)
class PoolChild:
    born_s: float
    process: ChildProcess = field(init=False)
    ready: bool = False
    sent: dict[int, EnvCall] = field(default_factory=dict)
    stepping: int = 0
    """Number of the sent calls that make a step in a session."""
    waiting: set[int] = field(default_factory=set)
    """Numbers of the calls that wait in an `async def`, so that other calls can begin."""
    last_message_s: float = 0.0
    """When the last message arrived (monotonic clock, seconds)."""
    running_call: tuple[int, float] = (0, 0.0)
    """The last observed value of ChildProcess.running_call."""

    room: int = sys.maxsize
    """Upper limit for the sent calls: the smallest that one of them allows."""

    def remove(self, call: EnvCall) -> None:
        """The child has answered a call."""
        del self.sent[call.number]
        self.waiting.discard(call.number)
        if call.moves:  # it may have been the one with the least room for others
            self.room = min((other.room for other in self.sent.values()), default=sys.maxsize)

    @property
    def queued(self) -> int:
        """Number of calls that are running or have not begun."""
        return len(self.sent) - len(self.waiting)

    @property
    def begun(self) -> list[EnvCall]:
        """The sent calls that may have run. Calls begin in the order in which they were sent, and the messages of the
        child arrive in the order in which it ran them."""
        running = next((number for number in self.sent if number not in self.waiting), None)
        return [call for number, call in self.sent.items() if number in self.waiting or number == running]


class QueueingHost(Generic[SomeCall]):
    """What an EnvHost shares with others whose calls wait for a process or a server."""

    def __init__(self, name: str, call_type: type[SomeCall]) -> None:
        self.name = name
        self.needs_tokens = False
        """Turns must come with their token ids."""
        self.stateful = False
        """The environment has sessions."""
        self._call_type = call_type
        self._next_number = 1
        self._pending: deque[SomeCall] = deque()
        self._opening: deque[SomeCall] = deque()
        """Calls that wait because they would open one session too many."""

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        return self.call("task", (index,), timeout_s)

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        given = [(t.text, t.observation, t.tokens) if self.needs_tokens else (t.text, t.observation) for t in turns]
        call = self.call("feedback", (index, task.id, zlib.crc32(prompt_key(task.prompt)), given), timeout_s)
        try:
            return await call
        except asyncio.CancelledError:
            # A result that has just arrived may have left a session that waits for a next turn.
            if call.done() and not call.cancelled() and call.exception() is None:
                self.end_session(index, task, answered(turns, call.result()))
            raise

    def end_session(self, index: int, task: Task, turns: Sequence[Turn]) -> None:
        self.end((task.id, *((t.text, t.observation) for t in turns)))

    def call(
        self, what: str, args: tuple[Any, ...], limit_s: float, begin: Callable[[], object] = lambda: None
    ) -> asyncio.Future[Any]:
        """Call "task" with (index,), or "feedback" with (index, id and CRC-32 of the prompt of the task, turns).
        `begin` is called when the call goes to a child, and again if it goes to another one."""
        name = f"{self.name}.task({args[0]})" if what == "task" else f"{self.name}.feedback of task '{args[1]}'"
        future = asyncio.get_running_loop().create_future()
        call = self._call_type(
            number=self._next_number, what=what, args=args, limit_s=limit_s, name=name, future=future, begin=begin
        )
        self._next_number += 1
        future.add_done_callback(lambda future: self._cancel(call) if future.cancelled() else None)
        self._enqueue(call)
        return future

    def end(self, key: Key) -> None:
        """Close a session that waits for its next turn, if there is one with these turns."""
        raise NotImplementedError

    def _enqueue(self, call: SomeCall) -> None:
        raise NotImplementedError

    def _cancel(self, call: SomeCall) -> None:
        """A call was canceled. If it has been sent, tell whoever runs it."""
        raise NotImplementedError

    def _sent_calls(self) -> list[SomeCall]:
        """The calls that were given to a process or a server."""
        raise NotImplementedError

    def _steps(self, call: SomeCall) -> bool:
        """Whether the call makes a step in a session."""
        return self.stateful and call.what == "feedback"

    def _open_calls(self) -> list[SomeCall]:
        return [*self._pending, *self._opening, *self._sent_calls()]

    def _cancel_all(self) -> None:
        for call in self._open_calls():
            call.future.cancel()
        self._pending.clear()
        self._opening.clear()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """If a task of the host fails because of a bug in windfall, all calls must fail: they must not wait forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for call in self._open_calls():
                call.fail(RuntimeError(f"the host of the environment failed: {error!r}"))
            raise error


def parse_answer(what: str, of: str, fields: list[Any]) -> Task | Feedback | EnvFailed:
    """Parse a child's answer to a call to the method `of`. Raises ValueError or TypeError if it is not an answer."""
    if what == "failed":
        error, cause, traceback, *final = fields
        return EnvFailed(str(error), str(cause), str(traceback), final=final == [True])
    if what != "value":
        raise ValueError(f"{what!r} is not an answer")
    value = _task(*fields) if of == "task" else _feedback(*fields)
    if fault := task_fault(value) if isinstance(value, Task) else feedback_fault(value):
        raise ValueError(fault)
    return value


def _task(id: Any, prompt: Any) -> Task:
    return Task(id=id, prompt=prompt)


def _feedback(reward: Any, observation: Any, scores: Any = ()) -> Feedback:
    return Feedback(reward=reward, observation=observation, scores=tuple((name, score) for name, score in scores))
