from __future__ import annotations

import pytest

from examples.guess import Guess
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn


def play(env: Guess, task: Task, *texts: str) -> Feedback:
    """Play these turns in order, and return the last feedback."""
    turns: list[Turn] = []
    feedback = Feedback()
    for text in texts:
        feedback = env.feedback(task, [*turns, Turn(text=text)])
        turns.append(Turn(text=text, observation=feedback.observation))
    return feedback


def test_hints_are_higher_or_lower() -> None:
    env, task = Guess(low=1, high=20), Task(id="guess/0", prompt="", answer=7)
    assert play(env, task, "3") == Feedback(observation="\nhigher\n", reward=0.0)
    assert play(env, task, "12 or rather 11") == Feedback(observation="\nlower\n", reward=0.0)
    assert play(env, task, "well") == Feedback(observation="\nsay a number\n", reward=0.0)
    assert play(env, task, "-3") == Feedback(observation="\nhigher\n", reward=0.0)
    assert play(env, task, "6.5") == Feedback(observation="\nhigher\n", reward=0.0)
    assert play(env, task, "7") == Feedback(reward=1.0)


def test_reward_falls_with_every_turn_and_is_zero_after_the_last() -> None:
    env, task = Guess(max_turns=3, turn_cost=0.1), Task(id="guess/0", prompt="", answer=7)
    assert play(env, task, "3", "7").reward == pytest.approx(0.9)
    assert play(env, task, "3", "8", "7").reward == pytest.approx(0.8)
    assert play(env, task, "3", "8", "6") == Feedback(reward=0.0)
    assert play(env, task, "3", "8", "hm") == Feedback(reward=0.0)


def test_halving_always_wins() -> None:
    env = Guess(seed=3)
    seen = set()
    for index in range(60):
        task = env.task(index)
        seen.add(task.answer)
        low, high, said = 1, 20, []
        while True:
            said.append(str((low + high) // 2))
            feedback = play(env, task, *said)
            if feedback.observation is None:
                break
            low, high = (int(said[-1]) + 1, high) if "higher" in str(feedback.observation) else (low, int(said[-1]) - 1)
        assert (feedback.reward or 0.0) >= 0.9
    assert (min(seen), max(seen)) == (1, 20)


def test_seeds_give_different_tasks() -> None:
    assert [Guess(seed=1).task(i).answer for i in range(20)] != [Guess(seed=2).task(i).answer for i in range(20)]


@pytest.mark.parametrize("options", [{"low": 5, "high": 5}, {"max_turns": 0}, {"turn_cost": 0.5}, {"turn_cost": -1.0}])
def test_invalid_options_are_refused(options: dict) -> None:
    with pytest.raises(WindfallError):
        Guess(**options)
