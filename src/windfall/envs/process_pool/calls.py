"""One call of an environment that is to be made in a child process, and what its parent knows of such a child."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from typing import Any

from windfall.envs.failures import EnvFailed, feedback_fault, task_fault
from windfall.envs.process_pool.child_process import ChildProcess
from windfall.types import Feedback, Task


@dataclass(kw_only=True, eq=False)
class Call:
    number: int
    what: str
    args: tuple[Any, ...]
    limit_s: float
    name: str
    future: asyncio.Future[Any]
    verdict: Feedback | None = None
    """What it is worth if the kernel ends its child for using too much CPU time."""
    late_s: float | None = None
    """When its child cancelled it for being over its limit."""
    stack: str = ""
    """Where it stood then."""
    moves: int = 0
    """Children that ended under it without any sign whose fault it was."""

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
    waiting: set[int] = field(default_factory=set)
    """Calls of an `async def` that let others begin."""
    heard_s: float = 0.0
    board: tuple[int, float] = (0, 0.0)
    """As it was seen last."""

    @property
    def queued(self) -> int:
        return len(self.sent) - len(self.waiting)


def answer(what: str, of: str, said: list[Any]) -> Task | Feedback | EnvFailed:
    """What a child said of a call of `task` or `feedback`. Raises ValueError or TypeError where that is no answer."""
    if what == "failed":
        error, cause, traceback = map(str, said)
        return EnvFailed(error, cause, traceback)
    if what != "value":
        raise ValueError(f"{what!r} is no answer")
    first, second = said
    value = Task(id=first, prompt=second) if of == "task" else Feedback(reward=first, observation=second)
    if fault := task_fault(value) if isinstance(value, Task) else feedback_fault(value):
        raise ValueError(fault)
    return value


def exited(code: int) -> str:
    """
    >>> exited(3), exited(-9)
    ('ended with status 3', 'was killed by SIGKILL')
    """
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
