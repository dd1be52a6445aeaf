"""A solver and a verifier on a data set of mathematics: one policy solves, the other judges the solution.

    solver     the question                                 a solution that ends with \\boxed{...}
    verifier   the question, and the solver's solution      reasons that end with "right" or "wrong"
    rewards    solver: 1 if its answer is right; verifier: 1 if its verdict is true

Train both: windfall train recipes/solver-verifier/qwen3-1.7b-lora.toml
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from windfall.envs.dataset import Dataset
from windfall.types import Feedback, Task, Turn

SOLVE = "Reason step by step, and put the final answer within \\boxed{}."
VERIFY = """Is the solution below right? Check each step. The last word of your response must be "right" or "wrong".

Question: {question}

Solution: {solution}"""


class SolverVerifier:
    """`data`: the data set, with the keys of an environment "dataset" (docs/recipes.md)."""

    def __init__(self, seed: int = 0, **data: Any) -> None:
        self._rows = Dataset(seed=seed, **data)

    def task(self, index: int) -> Task:
        row = self._rows.task(index)
        return Task(id=row.id, prompt=f"{row.prompt}\n{SOLVE}", answer=row.answer, role="solver")

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        graded = await self._rows.feedback(task, turns[:1])
        right = graded.reward == 1
        if len(turns) == 1:
            asked = VERIFY.format(question=task.answer.prompt, solution=turns[0].text)
            # The reward counts if the verifier has no tokens left.
            return Feedback(observation=asked, role="verifier", rewards={"solver": float(right)})
        return Feedback(rewards={"solver": float(right), "verifier": float(verdict(turns[1].text) == right)})


def verdict(text: str) -> bool | None:
    """
    >>> verdict("12 + 5 is 17, so it is **right**."), verdict("Wrong"), verdict("I think so")
    (True, False, None)
    """
    found = re.findall(r"\b(right|wrong)\b", text.lower())
    return found[-1] == "right" if found else None
