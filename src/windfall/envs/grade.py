"""Calls an environment with retries, because a call may be slow or fail: `grade` for the turns of a run, `trial` once
before a run begins, to report a broken environment immediately.

The rule kept here: a reward is what the environment returned, or it is missing. It is never made up. In particular, a
failure is never a zero, which would teach the policy that a good response was bad.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from windfall.backoff import delay_s
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    feedback: Feedback | None
    tries: int
    failure: EnvFailed | None = None
    """The last failure, also if a later try succeeded."""


async def grade(
    host: EnvHost,
    index: int,
    task: Task,
    turns: Sequence[Turn],
    *,
    tries: int = 3,
    timeout_s: float = 30.0,
    backoff_s: float = 0.1,
) -> Graded:
    """Get the feedback in at most `tries` tries of `timeout_s` each, with pauses of `backoff_s`, then twice that, and
    so on. A failure that is marked as final is not retried."""
    if tries < 1:
        raise ValueError(f"tries is {tries}; it must be 1 or more")
    last, number = None, 0
    for number in range(1, tries + 1):
        try:
            feedback = await host.feedback(index, task, turns, timeout_s)
            return Graded(feedback=feedback, tries=number, failure=last)
        except EnvFailed as e:
            last = e
        if last.final or number == tries:
            break
        await asyncio.sleep(delay_s(number - 1, first_s=backoff_s))
    assert last is not None
    return Graded(feedback=None, tries=number, failure=replace(last, error=f"{last.error} (try {number} of {tries})"))


async def trial(host: EnvHost, timeout_s: float, tries: int = 1) -> tuple[Task, str]:
    """Get task 0, and the feedback for an empty response to it. Each call is made once, because it may cost money, and
    repeated only if it fails. Returns the task and a description of the result."""
    async with host:
        await host.ready()
        where = f"environment {host.name}"
        try:
            task = await _with_retries(lambda: host.task(0, timeout_s), tries)
            said = Turn(text="", role=task.role)
            feedback = await _with_retries(lambda: host.feedback(0, task, [said], timeout_s), tries)
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
    rewards = ", ".join(f"{value:g} for {role}" for role, value in feedback.rewards.items())
    answer = " and ".join(part for part in (reward, f"rewards {rewards}" if rewards else "", what) if part)
    return task, f"environment {host.name}: built task '{task.id}'; an empty response to it got {answer}"


async def _with_retries(call: Callable[[], Awaitable[T]], tries: int) -> T:
    """Retry as a run does, because a failure may be temporary."""
    for _ in range(tries - 1):
        with contextlib.suppress(EnvFailed):
            return await call()
    return await call()
