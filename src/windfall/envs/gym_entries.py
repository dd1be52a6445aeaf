"""The part of `Gym` that imports reasoning-gym.

A reasoning-gym dataset is finite, and some datasets build all their items when opened. So the endless sequence of tasks
is split into datasets of `size` items. Dataset k is opened with seed `start + k * size` and generates its item i from
its seed + i, so together they form one sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

from windfall.envs.process_pool.limits import cpu_limit
from windfall.errors import WindfallError, nearest
from windfall.types import Feedback

WRONG = Feedback(reward=0.0)
OURS = {"seed", "size"}
NOT_A_TASK = {"composite"}

TOO_LENIENT = {"coin_flip", "game_of_life_halting"}
"""The scorers of these tasks (0.1.25) also give the full score to wrong answers: '0' for 0.25, and any text for True. A
policy exploits that, so here only the gold answer counts."""

NEVER_RIGHT = {
    "complex_arithmetic": "nan",  # gets the full score, because no comparison with it is true
    "binary_matrix": "(",  # these four pass answers to `eval`; without a bracket nothing can be called
    "n_queens": "(",
    "spiral_matrix": "(",
    "string_insertion": "(",
}
"""Text that no right answer contains and that the scorer must not get."""


def check(task: str, options: dict[str, Any]) -> None:
    """Raise if the task does not exist or does not accept these options."""
    where = f"gym task '{task}'"
    known = DATASETS.keys() - NOT_A_TASK
    if task not in known:
        raise WindfallError("there is no such task in reasoning-gym", where=where, fix=nearest(task, known))
    fields = [f.name for f in dataclasses.fields(DATASETS[task][1])]
    allowed = [name for name in fields if name not in OURS]
    for name in options:
        if name in OURS:
            raise WindfallError(f"option '{name}' is set by windfall", where=where, fix="Leave it out of the options.")
        if name not in allowed:
            raise WindfallError(
                f"unknown option '{name}'", where=where, fix=f"{nearest(name, allowed)} Allowed: {', '.join(allowed)}."
            )
    try:
        reasoning_gym.create_dataset(task, seed=0, size=1, **options)
    except Exception as e:  # asserts and TypeErrors of 100 config classes: all are caused by these options
        raise WindfallError(
            f"reasoning-gym refuses these options: {str(e) or type(e).__name__}",
            where=where,
            fix=f"Allowed: {', '.join(allowed)}.",
        ) from e


def make_entry(source: dict[str, Any], index: int) -> dict[str, Any]:
    entry = _entry(json.dumps(source, sort_keys=True), index)
    return {"question": entry["question"], "gold": entry["answer"]}


def score_answer(source: dict[str, Any], index: int, gold: str | None, answer: str, cpu_s: float) -> float:
    """The answer's score by reasoning-gym, which may be partial."""
    key = json.dumps(source, sort_keys=True)
    entry = _entry(key, index)
    if entry["answer"] != gold:
        raise ValueError(
            f"task {index} of '{source['task']}' was generated with the answer {gold!r}, but here it has "
            f"{entry['answer']!r}: check that the version of reasoning-gym and the seed are the same"
        )
    if source["task"] in TOO_LENIENT:
        return float(answer == gold)
    never = NEVER_RIGHT.get(source["task"])
    if never and never in answer.lower():
        return 0.0
    dataset = _dataset(key, index // source["size"])
    try:
        with cpu_limit(
            cpu_s, WRONG
        ):  # generating the entry is not limited: it may be slow, which the answer did not cause
            return float(dataset.score_answer(answer, entry))
    except MemoryError:
        raise
    except Exception:  # the entry is valid, so the answer caused the error: '1/0', 'x=', half a list
        return 0.0


@functools.lru_cache(maxsize=8)
def _dataset(key: str, number: int) -> ProceduralDataset:
    source = json.loads(key)
    seed = source["start"] + number * source["size"]
    return reasoning_gym.create_dataset(source["task"], seed=seed, size=source["size"], **source["options"])


@functools.lru_cache(maxsize=256)
def _entry(key: str, index: int) -> dict[str, Any]:
    number, item = divmod(index, json.loads(key)["size"])
    return _dataset(key, number)[item]
