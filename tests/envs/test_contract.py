"""The rules of every environment, tested through the Env interface only.

To add one, append a Case to CASES. Not covered here: what is peculiar to an environment (its own test file), and how
failures are retried (test_grade.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.guess import Guess
from windfall.envs.base import Env
from windfall.envs.dataset import Dataset
from windfall.envs.gym import Gym
from windfall.types import Feedback, Task, Turn


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    make: Callable[[Path], Any]
    """Builds a fresh environment, always the same one. The folder, also the same, holds the files that it needs."""
    right: Callable[[Task], str]
    wrong: Callable[[Task], str]
    needs: str = ""
    """The case is skipped without this package."""


def _file(folder: Path) -> Path:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}/2=", "answer": f"{n}/2"}) + "\n" for n in range(1, 30, 2)))
    return path


def _gym(task: str, **options: int) -> Case:
    return Case(
        name=f"gym-{task}",
        make=lambda folder: Gym(task, options, seed=5, size=10),
        right=lambda task: f"It may be 12. No:\n<answer>{task.answer['gold']}</answer>",
        wrong=lambda task: f"<answer>not {task.answer['gold']}</answer>",
        needs="reasoning_gym",
    )


CASES = [
    _gym("chain_sum", max_terms=3),
    _gym("spell_backward"),
    _gym("simple_equations"),
    _gym("acre"),  # one that builds a whole dataset when opened
    Case(
        name="jsonl-math",
        make=lambda folder: Dataset(_file(folder), seed=5),
        right=lambda task: f"So it is \\boxed{{{int(task.answer.answer[:-2]) / 2}}}.",
        wrong=lambda task: f"So it is \\boxed{{{int(task.answer.answer[:-2])}}}.",
        needs="math_verify",
    ),
    Case(
        name="jsonl-exact",
        make=lambda folder: Dataset(_file(folder), rewards=["exact"], seed=5),
        right=lambda task: f"Let me see.\n{task.answer.answer}\n",
        wrong=lambda task: f"{task.answer.answer}\nor not",
    ),
    Case(
        name="guess",
        make=lambda folder: Guess(high=1000, max_turns=1, seed=5),
        right=lambda task: f"I say {task.answer}.",
        wrong=lambda task: f"I say {task.answer + 1}.",
    ),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    if request.param.needs and importlib.util.find_spec(request.param.needs) is None:
        pytest.skip(f"needs {request.param.needs}")
    return request.param


def judge(env: Any, task: Task, *texts: str) -> Feedback:
    said = env.feedback(task, [Turn(text=text) for text in texts])
    feedback = asyncio.run(said) if inspect.iscoroutine(said) else said
    assert isinstance(feedback, Feedback)
    return feedback


def test_implements_env(case: Case, tmp_path: Path) -> None:
    assert isinstance(case.make(tmp_path), Env)


def test_same_index_same_task_in_any_order_and_instance(case: Case, tmp_path: Path) -> None:
    one, other = case.make(tmp_path), case.make(tmp_path)
    indices = [0, 3, 7, 40, 3]
    first = {i: one.task(i) for i in indices}
    assert first == {i: other.task(i) for i in reversed(indices)}


def test_task_ids_are_unique_and_tasks_differ(case: Case, tmp_path: Path) -> None:
    env = case.make(tmp_path)
    tasks = [env.task(i) for i in range(12)]
    assert len({task.id for task in tasks}) == len(tasks)
    assert len({(task.prompt, str(task.answer)) for task in tasks}) > 6
    assert all(task.prompt for task in tasks)


def test_tasks_have_no_end(case: Case, tmp_path: Path) -> None:
    env = case.make(tmp_path)
    assert len({env.task(i).id for i in [*range(200), 10**6, 10**9]}) == 202


def test_right_answer_is_rewarded_and_wrong_answer_is_not(case: Case, tmp_path: Path) -> None:
    env = case.make(tmp_path)
    for index in (0, 1, 25):
        task = env.task(index)
        assert judge(env, task, case.right(task)) == Feedback(reward=1.0)
        assert judge(env, task, case.wrong(task)) == Feedback(reward=0.0)
        assert judge(env, task, "") == Feedback(reward=0.0)


def test_feedback_keeps_no_state(case: Case, tmp_path: Path) -> None:
    env = case.make(tmp_path)
    tasks = [env.task(i) for i in range(4)]
    texts = [(task, text) for task in tasks for text in (case.right(task), case.wrong(task))]
    assert [judge(env, task, text).reward for task, text in texts] == [1.0, 0.0] * 4
    assert [judge(env, task, text).reward for task, text in reversed(texts)] == [0.0, 1.0] * 4
