"""Failures of an environment during a rollout: they are counted, logged once per cause, and finally end the run.

A task that cannot be used is skipped; a response that cannot be graded has no reward. Both are always counted. They are
logged when their cause first occurs, and again when it has occurred 10, 100, ... times. The first traceback of each
cause goes to the event log and to standard error, which is the controller's log.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from windfall.envs.failures import EnvFailed
from windfall.errors import WindfallError
from windfall.events.log import EventLog

SKIPPED_IN_A_ROW = 16
"""After this many unusable tasks in a row the run ends: the next task would be unusable too."""


MAX_CAUSES = 100
"""Number of causes that are counted separately. All further causes are counted together."""


@dataclass(kw_only=True, slots=True)
class Cause:
    error: str
    """The message of the first occurrence."""
    traceback: str
    count: int = 0


class Repeats:
    """Occurrences of each cause: reported at the first one, and again at the 10th, 100th, 1,000th.

    >>> repeats = Repeats()
    >>> [repeats.record("ValueError", f"task {n} raised ValueError", "") for n in range(12)]
    [1, None, None, None, None, None, None, None, None, 10, None, None]
    """

    def __init__(self) -> None:
        self._causes: dict[str, Cause] = {}

    def record(self, cause: str, error: str, traceback: str) -> int | None:
        """Count a failure. Returns the number of occurrences of its cause if they should be reported now."""
        if cause not in self._causes and len(self._causes) >= MAX_CAUSES:
            cause = "others"
        entry = self._causes.setdefault(cause, Cause(error=error, traceback=traceback))
        entry.count += 1
        power = 1
        while power < entry.count:
            power *= 10
        return entry.count if power == entry.count else None

    @property
    def worst(self) -> Cause | None:
        """The most frequent cause."""
        return max(self._causes.values(), key=lambda c: c.count, default=None)


class EnvFailures:
    def __init__(self, name: str, events: EventLog) -> None:
        self.missing = self.skipped = 0
        """Responses without a reward, and tasks that could not be used, since the last reset."""
        self._name, self._events = name, events
        self._rewards = Repeats()
        self._tasks = Repeats()
        self._retries = Repeats()
        self._in_a_row = 0

    def reset(self) -> None:
        self.missing = self.skipped = 0

    def usable(self) -> None:
        """A task was produced and fits the model's context."""
        self._in_a_row = 0

    def skip(self, index: int, e: EnvFailed) -> None:
        """Count a task that could not be used. Raises WindfallError after SKIPPED_IN_A_ROW of them."""
        self.skipped += 1
        self._in_a_row += 1
        if count := self._tasks.record(e.cause, e.error, e.traceback):
            self._log("task_skipped", e, count, task=index)
        if self._in_a_row >= SKIPPED_IN_A_ROW:
            raise self._fatal(f"{self._in_a_row} tasks in a row could not be used", self._tasks)

    def miss(self, response: str, e: EnvFailed) -> None:
        """Count a response without a reward."""
        self.missing += 1
        if count := self._rewards.record(e.cause, e.error, e.traceback):
            self._log("reward_missing", e, count, response=response)

    def retry(self, response: str, e: EnvFailed) -> None:
        """Count a response that got its reward only after a failed try."""
        if count := self._retries.record(e.cause, e.error, e.traceback):
            self._log("reward_retried", e, count, response=response)

    def no_rewards(self, what: str) -> WindfallError:
        """The error that ends a run if not one response of `what` got a reward."""
        if self.missing == 0 and self.skipped:
            return self._fatal(f"no task of {what} could be used; {self.skipped} were skipped", self._tasks)
        return self._fatal(f"no response of {what} got a reward; {self.missing} are missing", self._rewards)

    def _log(self, name: str, e: EnvFailed, count: int, **subject: Any) -> None:
        first = {"traceback": e.traceback} if e.traceback and count == 1 else {}
        self._events.instant(name, error=e.error, count=count, **subject, **first)
        if first:
            print(f"{e.error}\n{e.traceback}", file=sys.stderr, flush=True)

    def _fatal(self, what: str, repeats: Repeats) -> WindfallError:
        worst = repeats.worst
        if worst is not None:
            what += f". Most frequent cause ({worst.count} times in all): {worst.error}"
        trace = f"First traceback:\n{worst.traceback.rstrip()}\n" if worst and worst.traceback else ""
        fix = f"{trace}Correct the environment, then continue with `windfall resume`."
        return WindfallError(what, where=f"environment {self._name}", fix=fix)


OUT_OF_TOKENS = EnvFailed(
    "the response ran out of tokens (rollout.max_tokens) before the environment gave a reward; raise the limit, set "
    "rollout.out_of_tokens to a number, or return Feedback(observation=..., reward=...) to say what it is worth",
    "out of tokens",
)
