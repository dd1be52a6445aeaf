"""An environment in this process: in virtual time, in tests, or where it is known to take microseconds. A call that
blocks blocks it all."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

from windfall.envs.base import Env
from windfall.envs.failures import EnvFailed, feedback_fault, garbage, raised, task_fault, waited
from windfall.types import Feedback, Task, Turn


class InProcess:
    """Keeps to the Host seam."""

    def __init__(self, env: Env) -> None:
        self.env, self.name = env, type(env).__name__

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def ready(self) -> None: ...

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        """A plain `task` has run when this returns."""
        name = f"{self.name}.task({index})"
        future = asyncio.get_running_loop().create_future()
        try:
            made = self.env.task(index)
            if inspect.isawaitable(made):
                return asyncio.ensure_future(_limited(made, task_fault, name, timeout_s))
            future.set_result(_sound(made, task_fault, name))
        except EnvFailed as e:
            future.set_exception(e)
        except Exception as e:  # fault boundary: an environment is anybody's code
            future.set_exception(raised(name, e))
        return future

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        name = f"{self.name}.feedback of task '{task.id}'"
        try:
            said = self.env.feedback(task, turns)
        except Exception as e:  # fault boundary: an environment is anybody's code
            raise raised(name, e) from e
        if inspect.isawaitable(said):
            return await _limited(said, feedback_fault, name, timeout_s)
        return _sound(said, feedback_fault, name)


async def _limited(wait: Any, fault: Callable[[object], str], name: str, timeout_s: float) -> Any:
    clock = asyncio.timeout(timeout_s)
    try:
        async with clock:
            value = await wait
    except Exception as e:  # fault boundary: an environment is anybody's code
        raise (waited(name, timeout_s) if clock.expired() else raised(name, e)) from e
    return _sound(value, fault, name)


def _sound(value: Any, fault: Callable[[object], str], name: str) -> Any:
    if wrong := fault(value):
        raise garbage(name, wrong)
    return value
