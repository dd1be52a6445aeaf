"""An environment of the verifiers package: a chain of sums, one per turn. It knows nothing of windfall.

    environment     37+58-12=37+58=
    policy          95                  up to the stop string ";"
    environment     95-12=
    policy          83

The reward is the share of sums that were right before the first mistake.
Train it: windfall train recipes/verifiers.toml
"""

from __future__ import annotations

import random
from typing import Any

import verifiers as vf
from datasets import Dataset


def load_environment(rows: int = 2000, eval_rows: int = 200, max_sums: int = 6) -> vf.Environment:
    return ChainOfSums(
        dataset=_dataset(rows, "train", max_sums), eval_dataset=_dataset(eval_rows, "eval", max_sums),
        rubric=vf.Rubric(funcs=[share_right]), sampling_args={"max_tokens": 4, "stop": [";"]},
    )  # fmt: skip


class ChainOfSums(vf.MultiTurnEnv):
    """The row's info has the questions and the answers of all turns."""

    @vf.stop
    async def wrong_or_complete(self, state: vf.State) -> bool:
        said = len(state["trajectory"])
        return said > 0 and (right_answers(state) < said or said == len(state["info"]["answers"]))

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        return [{"role": "user", "content": state["info"]["questions"][len(state["trajectory"])]}]


def right_answers(state: vf.State) -> int:
    """Number of right answers before the first mistake."""
    answers = state["info"]["answers"]
    for number, turn in enumerate(state["trajectory"]):
        message = turn["completion"][-1]
        said = message["content"] if isinstance(message, dict) else message.content
        if said != answers[number]:
            return number
    return len(state["trajectory"])


def share_right(state: vf.State) -> float:
    return right_answers(state) / len(state["info"]["answers"])


def _dataset(rows: int, name: str, max_sums: int) -> Dataset:
    return Dataset.from_list([_row(random.Random(f"{name}/{number}"), max_sums) for number in range(rows)])


def _row(rng: random.Random, max_sums: int) -> dict[str, Any]:
    """All results are between 0 and 99."""
    totals = [rng.randint(0, 99)]
    changes: list[int] = []
    for _ in range(rng.randint(2, max_sums)):
        changes.append(rng.randint(-totals[-1], 99 - totals[-1]))
        totals.append(totals[-1] + changes[-1])
    questions = [f"{total}{change:+d}=" for total, change in zip(totals, changes, strict=False)]
    questions[0] = f"{totals[0]}{''.join(f'{change:+d}' for change in changes)}={questions[0]}"
    info = {"questions": questions, "answers": [str(total) for total in totals[1:]]}
    return {"prompt": [{"role": "user", "content": questions[0]}], "answer": info["answers"][-1], "info": info}
