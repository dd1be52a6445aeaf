"""Prompts and answers from a JSONL file. The file is read and checked once; every epoch uses a new order."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from windfall.envs.base import HELD_OUT
from windfall.envs.epochs import EpochOrder
from windfall.envs.held_out import split
from windfall.envs.scoring.extract import extract
from windfall.errors import WindfallError, install_command, nearest
from windfall.types import Feedback, Task, Turn

Scoring = Literal["math", "exact"]


class JsonLines:
    """`JsonLines("problems.jsonl")`, with lines such as {"prompt": "What is 2/4, simplified?", "answer": "1/2"}.

    Scoring `math` checks whether the answer means the same as the one in the file (math-verify: 0.5 is 1/2). Scoring
    `exact` checks whether it is the same text or the same number. The order of every epoch is derived from `seed`.
    Tasks from HELD_OUT on are the evaluation rows, always in the same order (see held_out.py).
    """

    def __init__(
        self,
        path: str | Path,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        scoring: Scoring = "math",
        *,
        eval_path: str | Path | None = None,
        held_out: float = 0.0,
        seed: int = 0,
        cpu_s: float = 5.0,
    ) -> None:
        if scoring not in get_args(Scoring):
            fix = nearest(scoring, get_args(Scoring))
            raise WindfallError(f"unknown scoring '{scoring}'", where=str(path), fix=fix)
        if scoring == "math" and importlib.util.find_spec("math_verify") is None:
            raise WindfallError("math-verify is not installed", fix=f"Install it: {install_command('math')}")
        self._path, self._scoring, self._seed, self._cpu_s = Path(path), scoring, seed, cpu_s
        eval_file = Path(eval_path) if eval_path is not None else None
        self._split = split(self._path, prompt_field, answer_field, eval_path=eval_file, held_out=held_out)
        self._order = EpochOrder(seed, len(self._split.train))

    def task(self, index: int) -> Task:
        rows, file = self._split.train, self._path
        if index >= HELD_OUT:
            rows, file = self._split.evaluation, self._split.file
            row = rows[(index - HELD_OUT) % len(rows)]
        else:
            row = rows[self._order.row(index)]
        return Task(id=f"{file.name}:{row.line}/{self._seed}/{index}", prompt=row.prompt, answer=row.answer)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        text, gold = turns[-1].text, task.answer
        if self._scoring == "exact":
            return Feedback(reward=float(extract(text, gold) == gold))
        from windfall.envs.scoring import math_answer  # slow to import, and may end the process: only in a child

        try:
            right = math_answer.means_the_same(gold, text, self._cpu_s)
        except MemoryError:
            right = False
        return Feedback(reward=float(right))
