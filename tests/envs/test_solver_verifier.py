"""The example with two roles: who speaks, what the verifier sees, and the rewards."""

from __future__ import annotations

from pathlib import Path

from examples.solver_verifier import SolverVerifier
from windfall.recipe.file import load_recipe
from windfall.types import Feedback, Task, Turn

TASK = Task(id="t", prompt="37+58-12=", answer=83)
WRONG, RIGHT = "37+58=95;95-12=84;#84", "95-12=83;#83"


def test_verifier_corrects_the_solver() -> None:
    env = SolverVerifier()
    assert env.task(3).role == "solver"
    asked = env.feedback(TASK, [Turn(text=WRONG, role="solver")])
    assert (asked.observation, asked.role, asked.rewards) == ("37+58-12=37+58=95;", "verifier", {"solver": 0.0})
    turns = [Turn(text=WRONG, observation=asked.observation, role="solver"), Turn(text=RIGHT, role="verifier")]
    assert env.feedback(TASK, turns) == Feedback(rewards={"solver": 0.0, "verifier": 1.0})


def test_solver_without_a_result_is_not_verified() -> None:
    assert SolverVerifier().feedback(TASK, [Turn(text="37+", role="solver")]) == Feedback(rewards={"solver": 0.0})


def test_recipe_has_both_policies_on_one_base() -> None:
    recipe = load_recipe(Path("recipes/solver-verifier.toml"))
    assert (recipe.names(), recipe.bases()) == (("solver", "verifier"), {"solver": ("solver", "verifier")})
    assert [recipe.of(name).rollout.max_tokens for name in recipe.names()] == [96, 160]
