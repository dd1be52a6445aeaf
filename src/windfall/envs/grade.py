"""Asking an environment for its feedback, which may be slow or fail.

The rule kept here: a reward is what the environment said, or it is missing. It is never made up; above all, a failure
is never a zero, which would teach the policy that a good response was a bad one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from windfall.envs.base import Env
from windfall.types import Feedback, Task, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """What came of it. `feedback` is None when every try failed, and `error` then says how the last one did."""

    feedback: Feedback | None
    tries: int
    error: str = ""


async def grade(
    env: Env, task: Task, turns: Sequence[Turn], *, tries: int = 3, timeout_s: float = 30.0, backoff_s: float = 0.1
) -> Graded:
    """The feedback, after at most `tries` tries of `timeout_s` each, with pauses of `backoff_s`, twice that, ..."""
    if tries < 1:
        raise ValueError(f"tries is {tries}, must be 1 or more")
    name, error = f"{type(env).__name__}.feedback of task '{task.id}'", ""
    for number in range(1, tries + 1):
        clock = asyncio.timeout(timeout_s)
        try:
            async with clock:
                feedback = await env.feedback(task, turns)
            error = _fault(feedback)
            if not error:
                return Graded(feedback=feedback, tries=number)
            error = f"{name} is wrong: {error}"
        except Exception as e:  # an environment is anybody's code; CancelledError is not an Exception and goes on up
            if isinstance(e, TimeoutError) and clock.expired():
                error = f"waited {timeout_s:g} s for {name}"
            else:
                error = f"{name} raised {type(e).__name__}: {e}"
        if number < tries:
            await asyncio.sleep(backoff_s * 2 ** (number - 1))
    return Graded(feedback=None, tries=tries, error=f"{error} (try {tries} of {tries})")


def _fault(feedback: object) -> str:
    """What makes this no proper Feedback, or ''."""
    if not isinstance(feedback, Feedback):
        return f"it is a {type(feedback).__name__}, not a Feedback"
    reward, observation = feedback.reward, feedback.observation
    if reward is None and observation is None:
        return "neither a reward nor an observation"
    if reward is not None and observation is not None:
        return "both a reward and an observation"
    if observation is not None:
        return "" if isinstance(observation, str) else f"the observation is a {type(observation).__name__}"
    if not isinstance(reward, int | float):
        return f"the reward is a {type(reward).__name__}, not a number"
    return "" if math.isfinite(reward) else f"the reward is {reward}"
