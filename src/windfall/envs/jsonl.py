"""Prompts and answers from a JSONL file: read and checked once, then gone through again and again in new orders."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from windfall.envs.extract import extract
from windfall.errors import WindfallError, nearest
from windfall.types import Feedback, Task, Turn

Scoring = Literal["math", "exact"]


class JsonLines:
    """`JsonLines("problems.jsonl")`, with lines such as {"prompt": "What is 2/4, simplified?", "answer": "1/2"}.

    Scoring `math` asks whether the answer means the same as the one in the file (math-verify: 0.5 is 1/2); `exact`
    whether it is the same text, or the same number. Every epoch has an order of its own, which follows from `seed`.
    """

    def __init__(
        self,
        path: str | Path,
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        scoring: Scoring = "math",
        *,
        seed: int = 0,
        cpu_s: float = 5.0,
    ) -> None:
        if scoring not in get_args(Scoring):
            raise WindfallError(f"scoring is '{scoring}'", where=str(path), fix=nearest(scoring, get_args(Scoring)))
        if scoring == "math" and importlib.util.find_spec("math_verify") is None:
            raise WindfallError("math-verify is not installed", fix="Install it: pip install 'windfall[math]'")
        self._path, self._scoring, self._seed, self._cpu_s = Path(path), scoring, seed, cpu_s
        self._rows = _read(self._path, prompt_field, answer_field)
        # Two epochs: responses of the one that ends are still under way when the next begins.
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def task(self, index: int) -> Task:
        epoch, at = divmod(index, len(self._rows))
        prompt, answer = self._rows[self._order(epoch)[at]]
        return Task(id=f"{self._path.stem}/{self._seed}/{index}", prompt=prompt, answer=answer)

    def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        text, gold = turns[-1].text, task.answer
        if self._scoring == "exact":
            return Feedback(reward=float(extract(text, gold) == gold))
        from windfall.envs import math_answer  # heavy; and only in a child process, which its limits may end

        try:
            right = math_answer.same(gold, text, self._cpu_s)
        except MemoryError:
            right = False
        return Feedback(reward=float(right))

    def _order_of(self, epoch: int) -> list[int]:
        def key(row: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}/{epoch}/{row}".encode(), digest_size=8).digest()

        return sorted(range(len(self._rows)), key=key)


def _read(path: Path, prompt_field: str, answer_field: str) -> list[tuple[str, str]]:
    if not path.is_file():
        what = "not a file" if path.exists() else "no such file"
        raise WindfallError(what, where=str(path), fix="Name a JSONL file.")
    rows: list[tuple[str, str]] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            row = _parse(line, where)
            prompt, answer = (_field(row, name, where) for name in (prompt_field, answer_field))
            if not isinstance(prompt, str) or not prompt:
                raise WindfallError(f"'{prompt_field}' is {json.dumps(prompt)}", where=where, fix="It must be text.")
            if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not str(answer).strip():
                raise WindfallError(
                    f"'{answer_field}' is {json.dumps(answer)}", where=where, fix="It must be text or a number."
                )
            rows.append((prompt, str(answer).strip()))
    if not rows:
        raise WindfallError("the file is empty", where=str(path), fix="Write one JSON object per line.")
    return rows


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except UnicodeDecodeError as e:
        raise WindfallError(f"not UTF-8: {e}", where=where, fix="Save the file as UTF-8.") from None
    except json.JSONDecodeError as e:
        raise WindfallError(f"not JSON: {e}", where=where, fix="Every line must be one JSON object.") from None
    if not isinstance(row, dict):
        raise WindfallError(f"a JSON {type(row).__name__}", where=where, fix="Every line must be one JSON object.")
    return row


def _field(row: dict[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise WindfallError(f"no field '{name}'", where=where, fix=nearest(name, row) or "The object is empty.")
    return row[name]
