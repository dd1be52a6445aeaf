"""Gets the feedback of an environment, with retries, because a call may be slow or fail.

The rule kept here: a reward is what the environment returned, or it is missing. It is never made up. In particular, a
failure is never a zero, which would teach the policy that a good response was bad.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from windfall.backoff import delay_s
from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.types import Feedback, Task, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """The result of `grade`. If every try failed, `feedback` is None. The other fields describe the last failure, also
    if a later try succeeded."""

    feedback: Feedback | None
    tries: int
    """Number of calls made."""
    error: str = ""
    cause: str = ""
    traceback: str = ""


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
    last, number = EnvFailed("", ""), 0
    for number in range(1, tries + 1):
        try:
            feedback = await host.feedback(index, task, turns, timeout_s)
            return Graded(feedback=feedback, tries=number, error=last.error, cause=last.cause, traceback=last.traceback)
        except EnvFailed as e:
            last = e
        if last.final or number == tries:
            break
        await asyncio.sleep(delay_s(number - 1, first_s=backoff_s))
    error = f"{last.error} (try {number} of {tries})"
    return Graded(feedback=None, tries=number, error=error, cause=last.cause, traceback=last.traceback)
