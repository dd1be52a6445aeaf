"""Every task of reasoning-gym, by name. The tasks are generated, so their number is unlimited.

reasoning-gym is heavy, some of its tasks depend on the hash seed, and some of its scorers evaluate the policy's text as
code. So it is imported only where a Gym is built: in a child process of process_pool.

A reasoning-gym dataset is finite, and some datasets build all their items when opened. So the endless sequence of tasks
is split into datasets of `size` items. Dataset k is opened with seed `start + k * size` and generates its item i from
its seed + i, so together they form one sequence.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from windfall.envs.base import HELD_OUT
from windfall.envs.process_pool.limits import cpu_limit
from windfall.envs.scoring.extract import extract
from windfall.errors import WindfallError, install_command, nearest
from windfall.types import Feedback, Task, Turn

INSTRUCTION = "End with the answer alone between <answer> and </answer>."
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
"""Text that no right answer contains and that must not reach the scorer."""


class Gym:
    """`Gym("chain_sum", {"max_terms": 2}, seed=0)`.

    reasoning-gym gives part of the reward to an answer that only contains the right one. So the answer is first
    extracted from the response. The reward is 1.0 if its score is at least `threshold`, and 0.0 otherwise; with
    `partial` the reward is the score. An answer that takes more than `cpu_s` seconds of CPU time to score is wrong.
    """

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        size: int = 1000,
        instruction: str = INSTRUCTION,
        *,
        threshold: float = 0.99,
        partial: bool = False,
        cpu_s: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise WindfallError("reasoning-gym is not installed", fix=f"Install it: {install_command('gym')}")
        self._options = dict(options or {})
        _check(task, self._options)
        self._name = task
        self._seed = seed
        self._size = size
        self._instruction = instruction
        self._threshold = threshold
        self._partial = partial
        self._cpu_s = cpu_s
        self._dataset = functools.lru_cache(maxsize=8)(self._open_dataset)
        self._entry = functools.lru_cache(maxsize=256)(self._make_entry)

    def task(self, index: int) -> Task:
        if index >= HELD_OUT:  # some tasks accept only seeds of 32 bits
            index = index - HELD_OUT + 2**31
        entry = self._entry(index)
        prompt = "\n".join(part for part in (entry["question"], self._instruction) if part)
        answer = {"index": index, "gold": entry["answer"]}
        return Task(id=f"{self._name}/{self._seed}/{index}", prompt=prompt, answer=answer)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        index, gold = task.answer["index"], task.answer["gold"]
        answer = extract(turns[-1].text, gold)
        if not answer:
            return Feedback(reward=0.0)
        try:
            score = self._score(index, gold, answer)
        except MemoryError:
            return Feedback(reward=0.0)
        return Feedback(reward=score if self._partial else float(score >= self._threshold))

    def _score(self, index: int, gold: str | None, answer: str) -> float:
        entry = self._entry(index)
        if entry["answer"] != gold:
            raise ValueError(
                f"task {index} of '{self._name}' was generated with the answer {gold!r}, but here it has "
                f"{entry['answer']!r}: check that the version of reasoning-gym and the seed are the same"
            )
        if self._name in TOO_LENIENT:
            return float(answer == gold)
        never = NEVER_RIGHT.get(self._name)
        if never and never in answer.lower():
            return 0.0
        dataset = self._dataset(index // self._size)
        try:
            # The limit does not cover generating the entry: if that is slow, the answer is not the cause.
            with cpu_limit(self._cpu_s, Feedback(reward=0.0)):
                return float(dataset.score_answer(answer, entry))
        except MemoryError:
            raise
        # The entry is valid, so the answer caused the error: '1/0', 'x=', half a list.
        except Exception:  # fault boundary: the answer caused the error
            return 0.0

    def _open_dataset(self, number: int) -> Any:
        import reasoning_gym

        seed = _start(self._seed) + number * self._size
        return reasoning_gym.create_dataset(self._name, seed=seed, size=self._size, **self._options)

    def _make_entry(self, index: int) -> dict[str, Any]:
        number, item = divmod(index, self._size)
        return self._dataset(number)[item]


def _check(task: str, options: dict[str, Any]) -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    where, known = f"gym task '{task}'", DATASETS.keys() - NOT_A_TASK
    if task not in known:
        raise WindfallError("there is no such task in reasoning-gym", where=where, fix=nearest(task, known))
    allowed = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in OURS]
    listed = f"Allowed: {', '.join(allowed)}."
    for name in options:
        if name in OURS:
            raise WindfallError(f"option '{name}' is set by windfall", where=where, fix="Leave it out of the options.")
        if name not in allowed:
            raise WindfallError(f"unknown option '{name}'", where=where, fix=f"{nearest(name, allowed)} {listed}")
    try:
        reasoning_gym.create_dataset(task, seed=0, size=1, **options)
    except Exception as e:  # fault boundary: 100 config classes raise asserts and TypeErrors for bad options
        what = f"reasoning-gym refuses these options: {str(e) or type(e).__name__}"
        raise WindfallError(what, where=where, fix=listed) from e


def _start(seed: int) -> int:
    """The first seed for reasoning-gym, which generates item i from seed + i. Unchanged, seeds 0 and 1 would share
    almost all tasks, so seeds are spread far apart."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big") >> 34
