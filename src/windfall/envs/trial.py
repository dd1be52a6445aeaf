"""One call of each kind before a run begins, so that a broken environment is named at once and not after a step."""

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
    """Task 0, and its feedback on an empty response: once each, as a call may cost money, and again only where a call
    fails. Returns the task, and says what came back."""
    async with host:
        await host.ready()
        where = f"environment {host.name}"
        try:
            task = await _tried(lambda: host.task(0, timeout_s), tries)
            said = await _tried(lambda: host.feedback(0, task, [Turn(text="")], timeout_s), tries)
        except EnvFailed as e:
            told = f"{e.traceback.rstrip()}\n" if e.traceback else ""
            if e.cause.startswith("no answer"):
                fix = f"{told}Make it faster, or raise rollout.reward_timeout_s."
            else:
                fix = f"{told}A policy may write anything: every task must be made, and every response judged."
            called = "a trial call" if tries == 1 else f"{tries} trial calls"
            raise WindfallError(f"{e.error} ({called} with an empty response)", where=where, fix=fix) from e
    what = f"an observation of {len(said.observation)} characters" if said.observation is not None else ""
    reward = f"reward {said.reward:g}" if said.reward is not None else ""
    answer = " and ".join(part for part in (reward, what) if part)
    return task, f"environment {host.name}: task '{task.id}' was made; an empty response to it got {answer}"


async def _tried(call: Callable[[], Awaitable[T]], tries: int) -> T:
    """As during a run: one failure may have passed by the next call."""
    for _ in range(tries - 1):
        with contextlib.suppress(EnvFailed):
            return await call()
    return await call()
