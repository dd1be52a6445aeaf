"""What grading costs and how it fails, for the step's event, `windfall top` and the summary.

A reward that takes long or that needs several tries delays a step; one that fails every try is missing. None of this
may go unnoticed, so every call is counted here, including those that succeed in the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from windfall.controller.rollout.env_failures import EnvFailures
from windfall.envs.base import EnvHost
from windfall.envs.grade import Graded, grade
from windfall.recipe.sections import RolloutSection
from windfall.types import Task, Turn

SLOW_S = 20.0
"""A reward that takes longer than this is reported (seconds)."""


class Grading:
    """Counters since the last reset, and the calls that are in progress (loop time, seconds)."""

    def __init__(self, load: Callable[[], dict[str, Any]] = dict) -> None:
        """`load`: how busy the environment is now, with the fields of envs.base.HostLoad."""
        self._load = load
        self._open: dict[int, float] = {}
        """Calls in progress, and when they were asked for."""
        self._next = 0
        self._times_s: list[float] = []
        self.errors = self.retried = self.peak = 0
        """Tries that failed, responses that needed more than one, and the most calls in progress at once."""
        self._reported_s = SLOW_S
        """The next report is due when a call has taken this long."""
        self.total_errors = 0
        """Tries that failed since the start."""

    def reset(self) -> None:
        self._times_s = []
        self.errors = self.retried = 0
        self.peak = len(self._open)

    @property
    def count(self) -> int:
        """Graded turns."""
        return len(self._times_s)

    @property
    def mean_s(self) -> float:
        """Seconds from the end of a turn to its reward, including the time in a queue and all tries."""
        return sum(self._times_s) / max(1, len(self._times_s))

    def begin(self, now_s: float) -> int:
        self._next += 1
        self._open[self._next] = now_s
        self.peak = max(self.peak, len(self._open))
        return self._next

    def abandon(self, number: int) -> None:
        """The call has no result, unless it has ended."""
        self._open.pop(number, None)

    def end(self, number: int, now_s: float, *, tries: int, failed: bool, counted: bool = True) -> None:
        """`failed`: the last try failed, too. `counted`: the turn belongs to a step, not to an evaluation beside it."""
        began_s = self._open.pop(number)
        errors = tries - 1 + failed
        self.errors, self.total_errors = self.errors + errors, self.total_errors + errors
        self.retried += errors > 0 and not failed
        if counted:
            self._times_s.append(now_s - began_s)

    def describe(self) -> dict[str, Any]:
        """Fields of the step's event."""
        times_s = sorted(self._times_s)
        load = self._load()
        p99 = times_s[math.ceil(0.99 * len(times_s)) - 1] if times_s else 0.0
        return {
            "reward_s": self.mean_s,
            "reward_s_p99": p99,
            "reward_s_max": times_s[-1] if times_s else 0.0,
            "grading_peak": self.peak,
            "grader_errors": self.errors,
            "rewards_retried": self.retried,
            "grader_processes": load.get("processes", 0),
            **({"env_servers": load["servers"]} if load.get("servers") else {}),
        }

    def slow_s(self, now_s: float) -> float | None:
        """How long the longest call has been in progress, if that should be reported now: after SLOW_S, and again
        whenever it has doubled."""
        longest_s = max((now_s - began_s for began_s in self._open.values()), default=0.0)
        if longest_s < self._reported_s:
            self._reported_s = SLOW_S if longest_s < SLOW_S else self._reported_s
            return None
        self._reported_s = 2 * longest_s
        return longest_s

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The current state, for `windfall top`."""
        longest_s = max((now_s - began_s for began_s in self._open.values()), default=0.0)
        return self._load() | {
            "grading": len(self._open),
            "longest_s": longest_s,
            "reward_s": self.mean_s,
            "errors": self.total_errors,
        }


class Grader:
    """Asks the environment for its verdict on turns, and counts what that takes and how it fails."""

    def __init__(self, env: EnvHost, options: RolloutSection, grading: Grading, failures: EnvFailures) -> None:
        self._env = env
        self._options = options
        self._grading = grading
        self._failures = failures

    async def grade(self, id: str, index: int, task: Task, turns: Sequence[Turn], *, counted: bool) -> Graded:
        """`id`: the response that the turns belong to. `counted`: it belongs to a step, not to an evaluation beside
        it."""
        loop, o = asyncio.get_running_loop(), self._options
        number = self._grading.begin(loop.time())
        try:
            graded = await grade(self._env, index, task, turns, tries=o.reward_tries, timeout_s=o.reward_timeout_s)
            failed = graded.feedback is None
            self._grading.end(number, loop.time(), tries=graded.tries, failed=failed, counted=counted)
        finally:
            self._grading.abandon(number)
        if graded.failure is not None and not failed:
            self._failures.retry(id, graded.failure)
        return graded
