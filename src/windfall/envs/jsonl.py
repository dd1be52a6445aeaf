"""Prompts and answers from a JSONL file: read and checked once, then gone through again and again in new orders."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from windfall.envs import apart
from windfall.envs.base import HELD_OUT
from windfall.envs.extract import extract, is_number
from windfall.envs.held_out import split
from windfall.envs.rows import Row, read
from windfall.errors import WindfallError, nearest
from windfall.types import Feedback, Task, Turn

Scoring = Literal["math", "exact"]
CHECK_S = 20.0
"""Right answers are checked at the start of a run for at most this long. Each of them takes milliseconds."""
CHUNK = 32
NAMED = 5


class JsonLines:
    """`JsonLines("problems.jsonl")`, with lines such as {"prompt": "What is 2/4, simplified?", "answer": "1/2"}.

    Scoring `math` asks whether the answer means the same as the one in the file (math-verify: 0.5 is 1/2); `exact`
    whether it is the same text, or the same number. Every epoch has an order of its own, which follows from `seed`.
    Tasks from HELD_OUT on are the rows to evaluate on, in an order that is always the same (see held_out.py).
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
            raise WindfallError(f"scoring is '{scoring}'", where=str(path), fix=nearest(scoring, get_args(Scoring)))
        if scoring == "math" and importlib.util.find_spec("math_verify") is None:
            raise WindfallError("math-verify is not installed", fix="Install it: pip install 'windfall[math]'")
        self._path, self._scoring, self._seed, self._cpu_s = Path(path), scoring, seed, cpu_s
        own = Path(eval_path) if eval_path is not None else None
        self._split = split(self._path, prompt_field, answer_field, eval_path=own, held_out=held_out)
        # Two epochs: responses of the one that ends are still under way when the next begins.
        self._order = functools.lru_cache(maxsize=2)(self._order_of)

    def task(self, index: int) -> Task:
        rows, file = self._split.train, self._path
        if index >= HELD_OUT:
            rows, file = self._split.evaluation, self._split.file
            row = rows[(index - HELD_OUT) % len(rows)]
        else:
            epoch, at = divmod(index, len(rows))
            row = rows[self._order(epoch)[at]]
        return Task(id=f"{file.name}:{row.line}/{self._seed}/{index}", prompt=row.prompt, answer=row.answer)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        text, gold = turns[-1].text, task.answer
        if self._scoring == "exact":
            return Feedback(reward=float(extract(text, gold) == gold))
        try:
            right = await apart.SCORING.acall("windfall.envs.math_answer:same", gold, text, self._cpu_s)
        except apart.TooCostly:
            right = False
        return Feedback(reward=float(right))

    def _order_of(self, epoch: int) -> list[int]:
        def key(row: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}/{epoch}/{row}".encode(), digest_size=8).digest()

        return sorted(range(len(self._split.train)), key=key)


def check_answers(section: Any, limit_s: float = CHECK_S, cpu_s: float = 5.0) -> int:
    """Refuse right answers that math-verify cannot compare with anything: every response to them would be wrong.

    `section` is a JSONL section of windfall.config. Distinct answers are checked for up to `limit_s`; what is left is
    checked when it is scored, where it is an error, never a zero. Returns how many were checked.
    """
    if section.scoring != "math":
        return 0
    files = [section.path] if section.eval_path is None else [section.path, section.eval_path]
    places: dict[str, tuple[Path, Row]] = {}
    for path in files:
        for row in read(path, section.prompt_field, section.answer_field):
            if not is_number(row.answer):
                places.setdefault(row.answer, (path, row))
    # In the order of a hash: where time does not suffice, a fair sample.
    golds = sorted(places, key=lambda gold: hashlib.blake2b(gold.encode(), digest_size=8).digest())
    bad, checked, began = dict[str, str](), 0, time.monotonic()
    while checked < len(golds) and time.monotonic() - began < limit_s:
        chunk = golds[checked : checked + CHUNK]
        bad |= _faults(chunk, cpu_s)
        checked += len(chunk)
    if bad:
        raise _refusal(bad, places, checked)
    return checked


def _faults(golds: list[str], cpu_s: float) -> dict[str, str]:
    try:
        said = apart.MAKING.call("windfall.envs.math_answer:faults", golds, cpu_s)
    except apart.TooCostly as e:
        if len(golds) == 1:
            return {golds[0]: f"comparing it goes {e}"}
        return {gold: why for one in golds for gold, why in _faults([one], cpu_s).items()}
    return {gold: why for gold, why in zip(golds, said, strict=True) if why}


def _refusal(bad: dict[str, str], places: dict[str, tuple[Path, Row]], checked: int) -> WindfallError:
    found = sorted(((places[gold], gold, why) for gold, why in bad.items()), key=lambda b: (str(b[0][0]), b[0][1].line))
    named = [f"{path}:{row.line}: {gold[:60]!r}: {why}" for (path, row), gold, why in found[:NAMED]]
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    return WindfallError(
        "\n  ".join([f"{len(bad)} of {checked} right answers cannot be scored as mathematics:", *named, *more]),
        where="env.scoring",
        fix='Set env.scoring = "exact" to compare text, or correct or remove these lines.',
    )
