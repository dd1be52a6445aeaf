"""Runs an environment in this process: in virtual time, in tests, or if its calls take microseconds. A blocking call
stops the whole process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

from windfall.envs import failures
from windfall.envs.base import Env, HostLoad
from windfall.envs.failures import EnvFailed
from windfall.types import Feedback, Task, Turn


class InProcess:
    def __init__(self, env: Env, name: str = "") -> None:
        self.env = env
        self.name = name or type(env).__name__
        self.needs_tokens = bool(getattr(env, "needs_tokens", False))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def ready(self) -> None: ...

    def load(self) -> HostLoad:
        return HostLoad()

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        """If the environment's `task` is a plain function, it has run when this returns."""
        name = f"{self.name}.task({index})"
        future = asyncio.get_running_loop().create_future()
        try:
            task = self.env.task(index)
            if inspect.isawaitable(task):
                return asyncio.ensure_future(_limited(task, failures.task_fault, name, timeout_s))
            future.set_result(_checked(task, failures.task_fault, name))
        except EnvFailed as e:
            future.set_exception(e)
        except Exception as e:  # fault boundary: an environment is foreign code
            future.set_exception(failures.exception_failure(name, e))
        return future

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        name = f"{self.name}.feedback of task '{task.id}'"
        try:
            feedback = self.env.feedback(task, turns)
        except Exception as e:  # fault boundary: an environment is foreign code
            raise failures.exception_failure(name, e) from e
        if inspect.isawaitable(feedback):
            return await _limited(feedback, failures.feedback_fault, name, timeout_s)
        return _checked(feedback, failures.feedback_fault, name)

    def end_session(self, index: int, task: Task, turns: Sequence[Turn]) -> None:
        """Does nothing: an environment in this process closes its sessions when they are idle."""


async def _limited(awaitable: Any, fault: Callable[[object], str], name: str, timeout_s: float) -> Any:
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            value = await awaitable
    except Exception as e:  # fault boundary: an environment is foreign code
        raise (
            failures.timeout_failure(name, timeout_s) if clock.expired() else failures.exception_failure(name, e)
        ) from e
    return _checked(value, fault, name)


def _checked(value: Any, fault: Callable[[object], str], name: str) -> Any:
    if wrong := fault(value):
        raise failures.invalid_value(name, wrong)
    return value
