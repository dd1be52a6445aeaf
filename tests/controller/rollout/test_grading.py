"""A slow or failing grader is counted, logged and shown, whether or not the reward arrives in the end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.engines.scripted_engine import Asks, Scripted, run
from windfall.controller.rollout.grading import SLOW_S, Grading
from windfall.events.log import read
from windfall.types import Feedback, Task, Turn


def test_failed_tries_are_counted_also_if_a_later_one_succeeds(tmp_path: Path) -> None:
    tries: dict[str, int] = {}

    async def flaky(task: Task, turns: Sequence[Turn]) -> Feedback:
        tries[task.id] = tries.get(task.id, 0) + 1
        if tries[task.id] == 1 or task.id == "n/2":
            raise ConnectionError("no server")
        return Feedback(reward=0.5, scores=(("a", 1.0), ("b", 0.0)))

    groups, rollout = run(
        Scripted(lambda request: "x"), Asks(flaky), tmp_path, tasks=[0, 1, 2], reward_tries=2, reward_timeout_s=5.0
    )
    by_task = {g.index: g.responses[0] for g in groups}
    assert [by_task[n].reward for n in range(3)] == [0.5, 0.5, None]
    assert by_task[0].scores == (("a", 1.0), ("b", 0.0))
    assert by_task[2].scores == ()
    said = rollout.grading.describe()
    assert (said["grader_errors"], said["rewards_retried"], rollout.failures.missing) == (4, 2, 1)
    assert said["reward_s_max"] >= said["reward_s_p99"] >= said["reward_s"] > 0.05  # with the pause before a retry
    assert 1 <= said["grading_peak"] <= 3
    events = {e["name"]: e for e in read(tmp_path / "events.jsonl")}
    assert "no server" in events["reward_retried"]["error"]
    assert "no server" in events["reward_missing"]["error"]


def test_calls_in_progress_are_reported_when_they_take_long() -> None:
    grading = Grading()
    first = grading.begin(0.0)
    grading.begin(5.0)
    assert grading.slow_s(SLOW_S - 1) is None
    assert grading.slow_s(SLOW_S + 1) == SLOW_S + 1
    assert grading.slow_s(SLOW_S + 2) is None  # not every second
    assert grading.slow_s(2 * SLOW_S + 2) == 2 * SLOW_S + 2  # again when it has doubled
    now = grading.snapshot(50.0)
    assert (now["grading"], now["longest_s"]) == (2, 50.0)
    grading.end(first, 60.0, tries=3, failed=True)
    grading.abandon(2)
    assert grading.snapshot(60.0)["grading"] == 0
    assert grading.snapshot(60.0)["errors"] == 3
    assert grading.mean_s == 60.0
    assert grading.slow_s(61.0) is None
    grading.begin(100.0)
    assert grading.slow_s(100.0 + SLOW_S) == pytest.approx(SLOW_S)  # a new slow call is reported, too
