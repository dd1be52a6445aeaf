"""A call to an environment in a child process, and what the parent knows about such a child."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windfall.envs.failures import EnvFailed, feedback_fault, task_fault
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.types import Feedback, Task

MAX_WAITING = 1024
"""Maximum number of waiting `async def` calls in one child."""


@dataclass(kw_only=True, eq=False)
class Call:
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
    sent: dict[int, Call] = field(default_factory=dict)
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

    def remove(self, call: Call) -> None:
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
    def begun(self) -> list[Call]:
        """The sent calls that may have run. Calls begin in the order in which they were sent, and the messages of the
        child arrive in the order in which it ran them."""
        running = next((number for number in self.sent if number not in self.waiting), None)
        return [call for number, call in self.sent.items() if number in self.waiting or number == running]


async def feedback_of(call: asyncio.Future[Any], unseen: Callable[[Feedback], None]) -> Feedback:
    """The result of a call. `unseen` gets it if whoever waits is canceled just after it has arrived: it may have left a
    session that waits for a next turn."""
    try:
        return await call
    except asyncio.CancelledError:
        if call.done() and not call.cancelled() and call.exception() is None:
            unseen(call.result())
        raise


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
