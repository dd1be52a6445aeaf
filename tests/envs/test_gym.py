"""The behavior specific to Gym. Not covered: the 105 scorers of reasoning-gym themselves."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from windfall.envs.gym import Gym
from windfall.envs.process_pool.pool import EnvPool
from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.types import Feedback, Task, Turn

pytestmark = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="needs reasoning_gym")


def reward(env: Gym, task: Task, text: str) -> float | None:
    return env.feedback(task, [Turn(text=text)]).reward


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        ("chian_sum", {}, "Did you mean 'chain_sum'?"),
        ("composite", {}, "no such task"),
        ("chain_sum", {"max_term": 3}, "Did you mean 'max_terms'? Allowed: min_terms, max_terms,"),
        ("chain_sum", {"seed": 3}, "'seed' is set by windfall"),
        ("chain_sum", {"max_terms": 0}, "max_terms must be >= min_terms"),
        ("chain_sum", {"max_terms": "three"}, "refuses these options"),
        ("chain_sum", {"max_terms": {3}}, "refuses these options"),
    ],
)
def test_invalid_options_are_refused(task: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(WindfallError) as caught:
        Gym(task, options, seed=0)
    assert says in str(caught.value)
    assert f"gym task '{task}'" in str(caught.value)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(WindfallError, match=r"pip install -e '.*\[gym\]'"):
        Gym("chain_sum", {}, seed=0)


def test_datasets_form_one_sequence() -> None:
    small, large = Gym("chain_sum", {}, seed=1, size=3), Gym("chain_sum", {}, seed=1, size=50)
    assert [small.task(i) for i in range(20)] == [large.task(i) for i in range(20)]


def test_seeds_share_no_tasks() -> None:
    prompts = [{Gym("gsm_symbolic", {}, seed=seed).task(i).prompt for i in range(30)} for seed in (0, 1)]
    assert not prompts[0] & prompts[1]


@pytest.mark.slow
def test_task_that_depends_on_the_hash_seed_is_the_same_in_every_process() -> None:
    program = "import test_gym; print(test_gym.prompts()); test_gym.check_imports()"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    # The hash seed of the other process. Ours is random, or 0 if it is set; that of the children is always 0.
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": path}
    elsewhere = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert f"{prompts()}\n" == elsewhere


def prompts() -> list[Any]:
    """The prompts of some tasks, made in a child of this process."""
    section = {"name": "gym", "task": "polynomial_multiplication"}

    async def go() -> list[Any]:
        async with EnvPool(parse_recipe({"env": section}, where="test").env, 0) as pool:
            await pool.ready()
            return [(await pool.task(i, 30.0)).prompt for i in range(5)]

    return asyncio.run(go())


def check_imports() -> None:
    """The requesting process does not import reasoning-gym."""
    assert not any(name.startswith("reasoning_gym") for name in sys.modules)


def test_wordy_answers_get_no_reward_without_partial() -> None:
    strict, partial = Gym("chain_sum", {}, seed=0), Gym("chain_sum", {}, seed=0, partial=True)
    task = strict.task(0)
    wordy = f"<answer>it is {task.answer['gold']}</answer>"
    assert reward(strict, task, wordy) == 0.0
    assert 0.0 < (reward(partial, task, wordy) or 0.0) < 1.0
    assert reward(partial, task, f"<answer>{task.answer['gold']}</answer>") == 1.0


def test_numeric_answer_is_the_last_number() -> None:
    env = Gym("chain_sum", {}, seed=0)
    task = env.task(0)
    assert reward(env, task, f"1 + 2 = 3, so {task.answer['gold']}.") == 1.0
    assert reward(env, task, f"{task.answer['gold']}, or rather 12345.") == 0.0


def test_instruction_is_in_the_prompt() -> None:
    assert Gym("gcd", {}, seed=0).task(0).prompt.endswith("\nEnd with the answer alone between <answer> and </answer>.")
    bare = Gym("gcd", {}, seed=0, instruction="").task(0).prompt
    assert Gym("gcd", {}, seed=0, instruction="Go.").task(0).prompt == f"{bare}\nGo."


@pytest.mark.parametrize(
    ("task", "answer"),
    [("coin_flip", "0"), ("game_of_life_halting", "xyz"), ("complex_arithmetic", "nan"), ("spiral_matrix", "exit()")],
)
def test_wrong_answers_that_reasoning_gym_accepts_get_no_reward(task: str, answer: str) -> None:
    env = Gym(task, {}, seed=0, partial=True)
    assert reward(env, env.task(0), f"<answer>{answer}</answer>") == 0.0
    gold = env.task(0).answer["gold"]
    assert reward(env, env.task(0), f"<answer>{gold}</answer>") == 1.0


def test_entry_with_another_answer_is_an_error_not_a_reward() -> None:
    env = Gym("chain_sum", {}, seed=0)
    other = Task(id="x", prompt="", answer={"index": 0, "gold": "no such"})
    with pytest.raises(ValueError, match="check that the version of reasoning-gym"):
        reward(env, other, "1")


@pytest.mark.slow
def test_answer_that_takes_too_long_to_score_is_wrong_and_blocks_nothing() -> None:
    named = {"name": "custom", "factory": "windfall.envs.gym:Gym", "options": {"task": "countdown", "cpu_s": 1.0}}
    gold = Gym("countdown", {}, seed=0).task(0).answer["gold"]

    async def go() -> None:
        async with EnvPool(parse_recipe({"env": named}, where="test").env, 0) as pool:
            await pool.ready()
            task, ticks = await pool.task(0, 30.0), 0
            scoring = asyncio.create_task(pool.feedback(0, task, [Turn(text="<answer>9**9**9</answer>")], 60.0))
            while not scoring.done():
                await asyncio.sleep(0.01)
                ticks += 1
            assert scoring.result() == Feedback(reward=0.0)
            assert ticks > 10
            # The child that scores this one is new, and has never seen the task.
            right = await pool.feedback(0, task, [Turn(text=f"<answer>{gold}</answer>")], 60.0)
            assert right == Feedback(reward=1.0)

    asyncio.run(go())
