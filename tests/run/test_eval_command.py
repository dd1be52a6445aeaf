"""`windfall eval`: the whole command on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = """
from windfall.types import Feedback, Task

class EveryOther:
    def __init__(self, seed):
        pass

    def task(self, index):
        return Task(id=str(index), prompt=f"{index}=", answer="")

    def feedback(self, task, turns):
        if int(task.id) % 2:
            raise RuntimeError("this grader knows even numbers only")
        return Feedback(reward=1.0)
"""


def test_the_reward_says_how_many_responses_were_graded(
    windfall: Callable[..., tuple[int, str, str]], here: Path
) -> None:
    (here / "every_other.py").write_text(ENVIRONMENT)
    sets = ["env.name=custom", "env.factory=every_other:EveryOther", "rollout.reward_tries=1", "rollout.max_tokens=2"]
    recipe = ["--recipe", "small.toml", *(f"--set={s}" for s in sets)]
    code, out, _ = windfall("eval", "tiny", *recipe, "--tasks", "6")
    assert code == 0
    shown = "reward 1.000 ± 0.000 (standard error) on 6 held-out tasks of every_other:EveryOther"
    assert f"{shown} (3 of 6 responses graded)" in out


def test_the_temperature_is_that_of_the_evaluations_of_a_run(windfall: Callable[..., tuple[int, str, str]]) -> None:
    recipe = ["eval", "tiny", "--recipe", "small.toml", "--tasks", "2", "--set", "eval.temperature=0"]
    assert "; temperature 0;" in windfall(*recipe)[1]
    assert "; temperature 0.5;" in windfall(*recipe, "--temperature", "0.5")[1]


def test_a_key_that_has_an_option_of_its_own_is_refused(windfall: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = windfall("eval", "tiny", "--recipe", "small.toml", "--set", "eval.tasks=2")
    assert (code, "Give --tasks instead." in err) == (2, True)
