"""Every task of reasoning-gym, by name. The tasks are generated, so there is no end of them.

reasoning-gym is heavy, some of its tasks depend on the hash seed, and some of its scorers evaluate text of the policy.
So it is imported only where a Gym is built, which is a child process of process_pool.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from windfall.envs.base import HELD_OUT
from windfall.envs.scoring.extract import extract
from windfall.errors import WindfallError
from windfall.types import Feedback, Task, Turn

INSTRUCTION = "End with the answer alone between <answer> and </answer>."


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
            raise WindfallError("reasoning-gym is not installed", fix="Install it: pip install 'windfall[gym]'")
        where = f"gym task '{task}'"
        if size < 1:
            fix = "It is the number of tasks in one dataset and must be 1 or more."
            raise WindfallError(f"size is {size}", where=where, fix=fix)
        try:
            options_data = json.loads(json.dumps(dict(options or {}), allow_nan=False))
        except (TypeError, ValueError) as e:
            raise WindfallError(f"options are not plain data: {e}", where=where) from None
        self._id, self._instruction = f"{task}/{seed}", instruction
        self._threshold, self._partial, self._cpu_s = threshold, partial, cpu_s
        self._source = {"task": task, "options": options_data, "start": _start(seed), "size": size}
        from windfall.envs import gym_entries

        gym_entries.check(task, options_data)
        self._entries = gym_entries

    def task(self, index: int) -> Task:
        if index >= HELD_OUT:  # some tasks accept only seeds of 32 bits
            index = index - HELD_OUT + 2**31
        entry = self._entries.make_entry(self._source, index)
        prompt = "\n".join(part for part in (entry["question"], self._instruction) if part)
        return Task(id=f"{self._id}/{index}", prompt=prompt, answer={"index": index, "gold": entry["gold"]})

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        index, gold = task.answer["index"], task.answer["gold"]
        answer = extract(turns[-1].text, gold)
        if not answer:
            return Feedback(reward=0.0)
        try:
            score = self._entries.score_answer(self._source, index, gold, answer, self._cpu_s)
        except MemoryError:
            return Feedback(reward=0.0)
        return Feedback(reward=score if self._partial else float(score >= self._threshold))


def _start(seed: int) -> int:
    """The first seed for reasoning-gym, which generates item i from seed + i. Seeds 0 and 1 would share their tasks, so
    they are spread far apart."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big") >> 34
