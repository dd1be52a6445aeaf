"""A solver and a verifier on chains of sums: two roles in one session, each with its own conversation and reward.

    solver     37+58-12=                37+58=95;95-12=84;#84
    verifier   37+58-12=37+58=95;       95-12=83;#83            it works out the second half of the steps again
    rewards    solver 0.0: its result is wrong; verifier 1.0: it has found the right one

The verifier confirms a right result or corrects a wrong one. It cannot find a mistake in the first half, so it gains if
the solver gets better, too. If the solver gives no result, there is nothing to verify, and only the solver is rewarded.

Train both, and see what each has learned: python examples/solver_verifier.py

It takes less than two minutes on two CPU cores. `windfall train recipes/solver-verifier.toml` is the same run without
the last lines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from windfall.envs.arithmetic import Arithmetic
from windfall.types import Feedback, Task, Turn

RECIPE = Path(__file__).parents[1] / "recipes" / "solver-verifier.toml"


class SolverVerifier:
    """`solver`, `verifier`: the roles. With ":solver" and ":verifier", one policy has both."""

    def __init__(
        self,
        seed: int = 0,
        mean_steps: float = 4.0,
        max_steps: int = 8,
        *,
        solver: str = "solver",
        verifier: str = "verifier",
    ) -> None:
        self._sums = Arithmetic(seed=seed, mean_steps=mean_steps, max_steps=max_steps)
        self._solver = solver
        self._verifier = verifier

    def task(self, index: int) -> Task:
        sums = self._sums.task(index)
        return Task(id=sums.id, prompt=sums.prompt, answer=sums.answer, role=self._solver)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        rewards = {turn.role: float(result(turn.text) == str(task.answer)) for turn in turns}
        if len(turns) == 2 or not result(turns[0].text):
            return Feedback(rewards=rewards)
        # The rewards count if the verifier has no tokens left.
        return Feedback(observation=f"{task.prompt}{first_half(turns[0].text)}", role=self._verifier, rewards=rewards)


def result(text: str) -> str:
    """
    >>> result("37+58=95;95-12=84;#84"), result("37+58=95;")
    ('84', '')
    """
    return text.rpartition("#")[2].strip() if "#" in text else ""


def first_half(text: str) -> str:
    """The first half of the steps, rounded down.

    >>> first_half("37+58=95;95-12=84;#84"), first_half("1+1=2;#2")
    ('37+58=95;', '')
    """
    steps = text.rpartition("#")[0].split(";")[:-1]
    return "".join(f"{step};" for step in steps[: len(steps) // 2])


def learned(run: Path) -> str:
    """What each role has learned, from the evaluations in the log of the run."""
    from windfall.events.log import read

    shares: dict[str, list[float]] = {}
    for event in read(run / "events.jsonl"):
        if (event["kind"], event["name"]) == ("scalar", "eval"):
            shares.setdefault(event["policy"], []).append(event["reward"])
    task = {"solver": "gives the right result", "verifier": "confirms or corrects the result rightly"}
    return "\n".join(
        f"The {role} {does} in {shares[role][-1]:.0%} of the held-out tasks; before training, in {shares[role][0]:.0%}."
        for role, does in task.items()
    )


def main() -> None:
    """Train both policies. Arguments change keys of the recipe, such as run.steps=30."""
    from windfall.recipe.file import load_recipe
    from windfall.run import start

    recipe = load_recipe(RECIPE, sys.argv[1:])
    run = start.new_folder(recipe)
    start.train(recipe, run)
    print(f"\n{learned(run)}")


if __name__ == "__main__":
    main()
