"""What goes wrong with an environment during a rollout: counted, told once per cause, and at last the end of the run.

A task that cannot be used is skipped; a response that cannot be judged has no reward. Both are always counted, and
told when their cause comes first, and again when it has come 10, 100, ... times. The first traceback of each cause goes
to the event log and to standard error, which is the controller's log.
"""

from __future__ import annotations

import sys
from typing import Any

from windfall.envs.failures import EnvFailed
from windfall.envs.repeats import Repeats
from windfall.errors import WindfallError
from windfall.events.log import EventLog

SKIPPED_IN_A_ROW = 16
"""This many unusable tasks, one after the other, have a cause that the next task will not cure."""


class EnvFailures:
    def __init__(self, name: str, events: EventLog) -> None:
        self.missing = self.skipped = 0
        """Responses without a reward, and tasks that could not be used, since the last reset."""
        self._name, self._events = name, events
        self._rewards, self._tasks = Repeats(), Repeats()
        self._in_a_row = 0

    def reset(self) -> None:
        self.missing = self.skipped = 0

    def usable(self) -> None:
        """A task was made and fits."""
        self._in_a_row = 0

    def skip(self, index: int, e: EnvFailed) -> None:
        """Raises WindfallError when too many tasks in a row could not be used."""
        self.skipped += 1
        self._in_a_row += 1
        if count := self._tasks.record(e.cause, e.error, e.traceback):
            self._tell("task_skipped", e, count, task=index)
        if self._in_a_row >= SKIPPED_IN_A_ROW:
            raise self._end(f"{self._in_a_row} tasks in a row could not be used", self._tasks)

    def miss(self, response: str, e: EnvFailed) -> None:
        self.missing += 1
        if count := self._rewards.record(e.cause, e.error, e.traceback):
            self._tell("reward_missing", e, count, response=response)

    def nothing(self, what: str) -> WindfallError:
        """Of all that was asked for, nothing got a reward."""
        if self.missing == 0 and self.skipped:
            return self._end(f"no task of {what} could be used; {self.skipped} were skipped", self._tasks)
        return self._end(f"no response of {what} got a reward; {self.missing} are missing", self._rewards)

    def _tell(self, name: str, e: EnvFailed, count: int, **of: Any) -> None:
        first = {"traceback": e.traceback} if e.traceback and count == 1 else {}
        self._events.instant(name, error=e.error, count=count, **of, **first)
        if first:
            print(f"{e.error}\n{e.traceback}", file=sys.stderr, flush=True)

    def _end(self, what: str, repeats: Repeats) -> WindfallError:
        worst = repeats.worst
        if worst is not None:
            what += f". Most frequent cause ({worst.count} times in all): {worst.error}"
        trace = f"First traceback:\n{worst.traceback.rstrip()}\n" if worst and worst.traceback else ""
        fix = f"{trace}Correct the environment, then go on with `windfall resume`."
        return WindfallError(what, where=f"environment {self._name}", fix=fix)


OUT_OF_TOKENS = EnvFailed(
    "the response ran out of tokens (rollout.max_tokens) before the environment gave a reward; raise the limit, or "
    "return Feedback(observation=..., reward=...) to say what such a response is worth",
    "out of tokens",
)
