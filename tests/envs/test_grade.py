from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from windfall.envs.grade import Graded, grade
from windfall.envs.in_process import InProcess
from windfall.sim.core import loop as loops
from windfall.types import Feedback, Task, Turn

TASK = Task(id="scripted/0", prompt="?")
TURNS = [Turn(text="!")]
GOOD = Feedback(reward=1.0)


class Scripted:
    """Performs the given actions in order: raises, sleeps, or answers."""

    def __init__(self, *script: Any) -> None:
        self.script, self.calls = script, 0

    def task(self, index: int) -> Task:
        return TASK

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        act = self.script[min(self.calls, len(self.script) - 1)]
        self.calls += 1
        if isinstance(act, BaseException):
            raise act
        if isinstance(act, float):
            await asyncio.sleep(act)
            return GOOD
        return act


def run(env: Scripted, **options: Any) -> Graded:
    options = {"timeout_s": 0.05, "backoff_s": 0.001, **options}
    return loops.run(lambda _: grade(InProcess(env), 0, TASK, TURNS, **options))


def test_success_on_the_first_try() -> None:
    env = Scripted(GOOD)
    assert run(env) == Graded(feedback=GOOD, tries=1)
    assert env.calls == 1


def test_observation_is_returned() -> None:
    assert run(Scripted(Feedback(observation="go on"))).feedback == Feedback(observation="go on")
    both = Feedback(observation="go on", reward=0.5)
    assert run(Scripted(both)).feedback == both


def test_flaky_env_succeeds_on_try_2() -> None:
    for first, says in ((ConnectionError("reset"), "ConnectionError: reset"), (10.0, "waited 0.05 s")):
        graded = run(Scripted(first, GOOD))
        assert (graded.feedback, graded.tries) == (GOOD, 2)
        assert says in str(graded.failure)  # so that the failed try can be shown


def test_failing_env_is_missing_never_zero() -> None:
    env = Scripted(ConnectionError("reset by peer"))
    graded = run(env)
    assert (graded.feedback, graded.tries, env.calls) == (None, 3, 3)
    for part in ("Scripted", "scripted/0", "ConnectionError: reset by peer", "try 3 of 3"):
        assert part in str(graded.failure)
    assert "test_grade.py" in (graded.failure.cause if graded.failure else "")
    assert "ConnectionError: reset by peer" in (graded.failure.traceback if graded.failure else "")


def test_slow_env_is_missing_and_named() -> None:
    graded = run(Scripted(10.0), tries=2)
    assert (graded.feedback, graded.tries) == (None, 2)
    assert str(graded.failure).startswith("waited 0.05 s for Scripted.feedback of task 'scripted/0'")


def test_timeout_raised_by_the_env_is_not_reported_as_ours() -> None:
    assert "raised TimeoutError: upstream" in str(run(Scripted(TimeoutError("upstream")), tries=1).failure)


@pytest.mark.parametrize(
    ("feedback", "fault"),
    [
        (Feedback(), "neither a reward nor an observation"),
        (Feedback(reward=math.nan), "the reward is nan"),
        (Feedback(reward=-math.inf), "the reward is -inf"),
        (Feedback(reward="1"), "the reward is a str"),  # type: ignore[arg-type]
        (None, "it is a NoneType"),
    ],
)
def test_invalid_feedback_is_a_failed_try(feedback: Any, fault: str) -> None:
    graded = run(Scripted(feedback))
    assert (graded.feedback, graded.tries) == (None, 3)
    assert fault in str(graded.failure)
    later = run(Scripted(feedback, GOOD))
    assert (later.feedback, later.tries) == (GOOD, 2)


def test_cancellation_is_passed_on() -> None:
    async def cancelled_while(env: Scripted) -> None:
        work = asyncio.create_task(grade(InProcess(env), 0, TASK, TURNS, backoff_s=10.0))
        await asyncio.sleep(0.01)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert env.calls == 1

    loops.run(lambda _: cancelled_while(Scripted(10.0)))  # waiting for the feedback
    loops.run(lambda _: cancelled_while(Scripted(OSError("no"))))  # waiting to try again


def test_pauses_between_tries_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr("windfall.envs.grade.asyncio.sleep", sleep)
    run(Scripted(OSError("no")), tries=4, backoff_s=0.1)
    assert pauses == pytest.approx([0.1, 0.2, 0.4])


def test_zero_tries_are_refused() -> None:
    with pytest.raises(ValueError, match="tries is 0"):
        run(Scripted(GOOD), tries=0)
