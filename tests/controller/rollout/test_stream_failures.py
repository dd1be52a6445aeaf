"""Environments that fail: tasks are skipped, rewards are missing, causes are logged once, and too many end the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.scripted_engine import Asks, Scripted, rolling, run
from windfall.controller.rollout.grading import SKIPPED_IN_A_ROW, EnvFailures
from windfall.envs.failures import EnvFailed
from windfall.errors import WindfallError
from windfall.events.log import Event, EventLog, read
from windfall.types import Feedback, Sampling, Task, Turn


async def right(task: Task, turns: Sequence[Turn]) -> Feedback:
    return Feedback(reward=1.0)


class Picky(Asks):
    """An environment that cannot produce some of its tasks."""

    def __init__(self, bad: Any, judge: Any = right) -> None:
        super().__init__(judge)
        self._bad = bad

    def task(self, index: int) -> Task:
        if self._bad(index):
            raise LookupError(f"row {index} is broken")
        return super().task(index)


def logged(folder: Path, name: str) -> list[Event]:
    return [e for e in read(folder / "events.jsonl") if e["name"] == name]


def test_task_that_cannot_be_produced_is_skipped_counted_and_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    env = Picky(lambda index: index % 3 == 0)
    groups, rollout = run(Scripted(lambda r: "x"), env, tmp_path, tasks=range(12))
    assert sorted(g.index for g in groups) == [1, 2, 4, 5, 7, 8, 10, 11]
    assert rollout.failures.skipped == 4
    (event,) = logged(tmp_path, "task_skipped")  # the other three have the same cause
    assert event["error"] == "Picky.task(0) raised LookupError: row 0 is broken"
    assert (event["task"], event["count"]) == (0, 1)
    assert "in task" in event["traceback"]
    assert "row 0 is broken" in capfd.readouterr().err  # the controller's log


def test_many_skipped_tasks_in_a_row_end_the_run_with_the_first_traceback(tmp_path: Path) -> None:
    env = Picky(lambda index: index >= 5)
    with pytest.raises(WindfallError) as caught:
        run(Scripted(lambda r: "x"), env, tmp_path, tasks=range(40))
    said = str(caught.value)
    assert f"environment Picky: {SKIPPED_IN_A_ROW} tasks in a row could not be used" in said
    assert "row 5 is broken" in said
    assert "Traceback" in said


def test_tasks_that_fail_now_and_then_do_not_end_the_run(tmp_path: Path) -> None:
    env = Picky(lambda index: index % SKIPPED_IN_A_ROW != 0)
    groups, rollout = run(Scripted(lambda r: "x"), env, tmp_path, tasks=range(90))
    assert [g.index for g in groups] == [0, 16, 32, 48, 64, 80]
    assert rollout.failures.skipped == 84


def test_task_whose_prompt_leaves_no_room_is_skipped(tmp_path: Path) -> None:
    """Prompts are 2 characters up to task 9, then 3; a response may have 20 tokens."""

    async def roll(context: int) -> tuple[list[int], int]:
        async with rolling(Scripted(lambda r: "x"), Asks(right), tmp_path, max_tokens=20) as rollout:
            rollout.contexts[""] = context
            groups = [g.index async for g in rollout.groups(range(7, 14), size=1, sampling=lambda policy: Sampling())]
            return groups, rollout.failures.skipped

    assert asyncio.run(roll(23)) == ([7, 8, 9, 10, 11, 12, 13], 0)
    assert asyncio.run(roll(22)) == ([7, 8, 9], 4)
    (event,) = logged(tmp_path, "task_skipped")
    for part in ("n/10", "has 3 tokens", "rollout.max_tokens = 20", "context of 22"):
        assert part in event["error"]


def test_repeats_of_a_cause_are_logged_rarely(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def judge(task: Task, turns: Sequence[Turn]) -> Feedback:
        if task.answer % 2:
            raise ConnectionError(f"no grader for task {task.answer}")
        return Feedback()

    groups, rollout = run(Scripted(lambda r: "x"), Asks(judge), tmp_path, tasks=range(60))
    assert all(g.rewards == () for g in groups)
    assert rollout.failures.missing == 60
    events = logged(tmp_path, "reward_missing")
    assert sorted((e["count"], "no grader" in e["error"]) for e in events) == [
        (1, False), (1, True), (10, False), (10, True)
    ]  # fmt: skip
    assert [e["count"] for e in events if "traceback" in e] == [1]  # feedback without a reward has none
    assert capfd.readouterr().err.count("Traceback") == 1
    said = str(rollout.failures.no_rewards("step 1", 60))
    assert "environment Asks: no response of step 1 got a reward; 60 are missing" in said
    assert "(30 times in all)" in said


def test_number_of_logged_causes_is_bounded(tmp_path: Path) -> None:
    failures = EnvFailures("E", EventLog(tmp_path / "events.jsonl"))
    for n in range(5000):
        failures.miss(f"{n}/0", EnvFailed(f"error {n}", f"cause {n}"))
    assert failures.missing == 5000
    assert len(logged(tmp_path, "reward_missing")) < 110
