"""Asking an environment for its feedback, which may be slow or fail.

The rule kept here: a reward is what the environment said, or it is missing. It is never made up; above all, a failure
is never a zero, which would teach the policy that a good response was a bad one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.types import Feedback, Task, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """What came of it. `feedback` is None when every try failed; `error`, `cause` and `traceback` then say how the last
    one did."""

    feedback: Feedback | None
    tries: int
    error: str = ""
    cause: str = ""
    traceback: str = ""


async def grade(
    host: EnvHost, index: int, task: Task, turns: Sequence[Turn], *, tries: int = 3, timeout_s: float = 30.0,
    backoff_s: float = 0.1,
) -> Graded:  # fmt: skip
    """The feedback, after at most `tries` tries of `timeout_s` each, with pauses of `backoff_s`, twice that, ...
    A failure that says that it is final is not tried again."""
    if tries < 1:
        raise ValueError(f"tries is {tries}, must be 1 or more")
    last, number = EnvFailed("", ""), 0
    for number in range(1, tries + 1):
        try:
            return Graded(feedback=await host.feedback(index, task, turns, timeout_s), tries=number)
        except EnvFailed as e:
            last = e
        if last.final or number == tries:
            break
        await asyncio.sleep(backoff_s * 2 ** (number - 1))
    error = f"{last.error} (try {number} of {tries})"
    return Graded(feedback=None, tries=number, error=error, cause=last.cause, traceback=last.traceback)
