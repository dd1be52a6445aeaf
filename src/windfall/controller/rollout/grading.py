"""Grading: asks the environment for its verdict on turns, and counts what that takes and how it fails.

A reward that takes long or needs several tries delays a step; one that fails every try is missing. A task that cannot
be used is skipped. None of this may go unnoticed: all of it is counted, for the step's event, `windfall top` and the
summary. A failure is logged when its cause first occurs, and again when it has occurred 10, 100, ... times. The first
traceback of each cause goes to the event log and to standard error, which is the controller's log. After many
unusable tasks in a row the run ends.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from windfall.envs.base import EnvHost
from windfall.envs.failures import EnvFailed
from windfall.envs.grade import Graded, grade
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.recipe.sections import RolloutSection
from windfall.types import Task, Turn

SLOW_S = 20.0
"""A reward that takes longer than this is reported (seconds)."""
SKIPPED_IN_A_ROW = 16
"""After this many unusable tasks in a row the run ends: the next task would be unusable too."""
MAX_CAUSES = 100
"""Number of causes that are counted separately. All further causes are counted together."""
OUT_OF_TOKENS = EnvFailed(
    "the response ran out of tokens (rollout.max_tokens) before the environment gave a reward; raise the limit, set "
    "rollout.out_of_tokens to a number, or return Feedback(observation=..., reward=...) to say what it is worth",
    "out of tokens",
)


@dataclass(slots=True)
class _Cause:
    first: EnvFailed
    count: int = 0


class EnvFailures:
    def __init__(self, name: str, events: EventLog) -> None:
        """`name`: that of the environment."""
        self.missing = self.skipped = 0
        """Responses without a reward, and tasks that could not be used, since the last reset, without those of
        evaluations."""
        self._name = name
        self._events = events
        self._causes: dict[str, dict[str, _Cause]] = {}
        """By event, by cause."""
        self._skipped_in_a_row = 0

    def reset(self) -> None:
        self.missing = self.skipped = 0

    def usable(self) -> None:
        """A task was produced and fits the model's context."""
        self._skipped_in_a_row = 0

    def skip(self, index: int, e: EnvFailed, *, counted: bool = True) -> None:
        """Count a task that could not be used. Raises WindfallError after SKIPPED_IN_A_ROW of them. `counted`: it
        belongs to a step."""
        self.skipped += counted
        self._skipped_in_a_row += 1
        self._record("task_skipped", e, task=index)
        if self._skipped_in_a_row >= SKIPPED_IN_A_ROW:
            raise self._fatal(f"{self._skipped_in_a_row} tasks in a row could not be used", "task_skipped")

    def miss(self, response: str, e: EnvFailed, *, counted: bool = True) -> None:
        """Count a response without a reward. `counted`: it belongs to a step."""
        self.missing += counted
        self._record("reward_missing", e, response=response)

    def retry(self, response: str, e: EnvFailed) -> None:
        """Count a response that got its reward only after a failed try."""
        self._record("reward_retried", e, response=response)

    def no_rewards(self, what: str, missing: int) -> WindfallError:
        """The error that ends a run if `what` has this number of responses, and not one of them got a reward."""
        if not missing and "task_skipped" in self._causes:
            return self._fatal(f"no task of {what} could be used", "task_skipped")
        return self._fatal(f"no response of {what} got a reward; {missing} are missing", "reward_missing")

    def _record(self, event: str, e: EnvFailed, **subject: Any) -> None:
        causes = self._causes.setdefault(event, {})
        cause = causes.setdefault(e.cause if e.cause in causes or len(causes) < MAX_CAUSES else "others", _Cause(e))
        cause.count += 1
        if 10 ** (len(str(cause.count)) - 1) != cause.count:
            return
        first = {"traceback": e.traceback} if e.traceback and cause.count == 1 else {}
        self._events.instant(event, error=e.error, count=cause.count, **subject, **first)
        if first:
            print(f"{e.error}\n{e.traceback}", file=sys.stderr, flush=True)

    def _fatal(self, what: str, event: str) -> WindfallError:
        trace = ""
        if causes := self._causes.get(event):
            worst = max(causes.values(), key=lambda cause: cause.count)
            what += f". Most frequent cause ({worst.count} times in all): {worst.first.error}"
            trace = f"First traceback:\n{worst.first.traceback.rstrip()}\n" if worst.first.traceback else ""
        fix = f"{trace}Correct the environment, then continue with `windfall resume`."
        return WindfallError(what, where=f"environment {self._name}", fix=fix)


class Grading:
    """Counters since the last reset, and the calls that are in progress (loop time, seconds)."""

    def __init__(self, load: Callable[[], dict[str, Any]] = dict) -> None:
        """`load`: how busy the environment is now, with the fields of envs.base.HostLoad."""
        self._load = load
        self._open: dict[int, float] = {}
        """Calls in progress, and when they were asked for."""
        self._beside: set[int] = set()
        """Those of evaluations."""
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
        self.peak = len(self._open) - len(self._beside)

    @property
    def mean_s(self) -> float:
        """Seconds from the end of a turn to its reward, including the time in a queue and all tries."""
        return sum(self._times_s) / max(1, len(self._times_s))

    def begin(self, now_s: float, *, counted: bool = True) -> int:
        """`counted`: the turn belongs to a step, not to an evaluation."""
        self._next += 1
        self._open[self._next] = now_s
        if not counted:
            self._beside.add(self._next)
        self.peak = max(self.peak, len(self._open) - len(self._beside))
        return self._next

    def abandon(self, number: int) -> None:
        """The call has no result, unless it has ended."""
        self._open.pop(number, None)
        self._beside.discard(number)

    def end(self, number: int, now_s: float, *, tries: int, failed: bool) -> None:
        """`failed`: the last try failed, too."""
        began_s = self._open.pop(number)
        errors = tries - 1 + failed
        self.total_errors += errors
        if number in self._beside:
            self._beside.remove(number)
            return
        self.errors += errors
        self.retried += errors > 0 and not failed
        self._times_s.append(now_s - began_s)

    def describe(self) -> dict[str, Any]:
        """Fields of the step's event."""
        times_s = sorted(self._times_s)
        load = self._load()
        return {
            "reward_s": self.mean_s,
            "reward_s_p99": times_s[math.ceil(0.99 * len(times_s)) - 1] if times_s else 0.0,
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
        longest_s = self._longest_s(now_s)
        if longest_s < self._reported_s:
            self._reported_s = SLOW_S if longest_s < SLOW_S else self._reported_s
            return None
        self._reported_s = 2 * longest_s
        return longest_s

    def snapshot(self, now_s: float) -> dict[str, Any]:
        """The current state, for `windfall top`."""
        now = {"grading": len(self._open), "longest_s": self._longest_s(now_s)}
        return self._load() | now | {"reward_s": self.mean_s, "errors": self.total_errors}

    def _longest_s(self, now_s: float) -> float:
        return max((now_s - began_s for began_s in self._open.values()), default=0.0)


@dataclass(frozen=True, slots=True)
class Grader:
    """Asks the environment for its verdict on turns, and counts what that takes and how it fails."""

    env: EnvHost
    options: RolloutSection
    grading: Grading
    failures: EnvFailures

    async def grade(self, id: str, index: int, task: Task, turns: Sequence[Turn], *, counted: bool) -> Graded:
        """`id`: the response that the turns belong to. `counted`: it belongs to a step, not to an evaluation."""
        loop, o = asyncio.get_running_loop(), self.options
        number = self.grading.begin(loop.time(), counted=counted)
        try:
            graded = await grade(self.env, index, task, turns, tries=o.reward_tries, timeout_s=o.reward_timeout_s)
            failed = graded.feedback is None
            self.grading.end(number, loop.time(), tries=graded.tries, failed=failed)
        finally:
            self.grading.abandon(number)
        if graded.failure is not None and not failed:
            self.failures.retry(id, graded.failure)
        return graded
