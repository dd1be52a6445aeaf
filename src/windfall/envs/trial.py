"""Calls each method of the environment once before a run begins, to report a broken environment immediately."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.errors import WindfallError
from windfall.types import Task, Turn

T = TypeVar("T")


async def trial(host: EnvHost, timeout_s: float, tries: int = 1) -> tuple[Task, str]:
    """Get task 0, and the feedback for an empty response to it. Each call is made once, because it may cost money, and
    repeated only if it fails. Returns the task and a description of the result."""
    async with host:
        await host.ready()
        where = f"environment {host.name}"
        try:
            task = await _with_retries(lambda: host.task(0, timeout_s), tries)
            feedback = await _with_retries(lambda: host.feedback(0, task, [Turn(text="")], timeout_s), tries)
        except EnvFailed as e:
            trace = f"{e.traceback.rstrip()}\n" if e.traceback else ""
            if e.cause.startswith("no answer"):
                fix = f"{trace}Make it faster, or raise rollout.reward_timeout_s."
            else:
                fix = f"{trace}A policy may write anything: the environment must handle every task and every response."
            called = "a trial call" if tries == 1 else f"{tries} trial calls"
            raise WindfallError(f"{e.error} ({called} with an empty response)", where=where, fix=fix) from e
    what = f"an observation of {len(feedback.observation)} characters" if feedback.observation is not None else ""
    reward = f"reward {feedback.reward:g}" if feedback.reward is not None else ""
    answer = " and ".join(part for part in (reward, what) if part)
    return task, f"environment {host.name}: built task '{task.id}'; an empty response to it got {answer}"


async def _with_retries(call: Callable[[], Awaitable[T]], tries: int) -> T:
    """Retry as a run does, because a failure may be temporary."""
    for _ in range(tries - 1):
        with contextlib.suppress(EnvFailed):
            return await call()
    return await call()
