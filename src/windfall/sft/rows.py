"""Rows of a supervised data set, as text and as tokens.

    {"prompt": "37+58=", "completion": "95"}                  each a text, or a list of messages
    {"messages": [{"role": "user", "content": "..."}, ...]}   every turn of the assistant is one; may have "tools"

Rules:
- Only tokens of completions are targets, with the token that ends the turn. Prompts are rendered as a run of
  reinforcement learning renders them, so the policy finds the same prompts there.
- A row that cannot be used is an error that names its line. No row is skipped or cut silently.
- Which rows a step trains on is a function of the seed and the step.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from windfall.envs.data import table
from windfall.errors import WindfallError
from windfall.models.text import Text
from windfall.training import Sample, given
from windfall.types import Prompt

SHOWN = 10
"""Unusable rows that an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    where: str
    """File and line."""
    prompt: Prompt
    """What precedes the completion; a whole conversation if that is None."""
    completion: str | None
    tools: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """The tokens of a row."""

    ids: np.ndarray
    targets: np.ndarray
    """Positions of the completion's tokens."""

    def sample(self, weight: float) -> Sample:
        """For a cross entropy in which every target has this weight."""
        return given(self.ids.tolist(), self.targets.tolist(), [weight] * len(self.targets))


def read(file: Path) -> list[Row]:
    """All rows of the file. Raises WindfallError with the lines of those that cannot be used."""
    rows, problems = [], []
    for number, data in table.read_rows(file):
        where = table.place(file, number)
        found = _row(data, where)
        if isinstance(found, Row):
            rows.append(found)
        else:
            problems.append(f"{where}: {found}")
    _refuse(problems, len(rows) + len(problems), file, "Correct these rows, or remove them.")
    if not rows:
        raise WindfallError("the data set is empty", where=str(file), fix="Give a file that has rows.")
    return rows


def tokenize(rows: Sequence[Row], text: Text, limit: int | None, file: Path) -> list[Example]:
    """The tokens of all rows. Raises WindfallError with the lines of those that cannot be rendered or are longer than
    the limit."""
    examples, problems = [], []
    for row in rows:
        try:
            stretches = text.turns(row.prompt, row.completion, row.tools)
        except WindfallError as e:
            problems.append(f"{row.where}: {e.what}")
            continue
        ids = [id for part, _ in stretches for id in part]
        targets = np.flatnonzero([trained for part, trained in stretches for _ in part])
        if limit is not None and len(ids) > limit:
            problems.append(f"{row.where}: {len(ids)} tokens, but {limit} is the limit")
        elif not len(targets) or not targets[0]:
            problems.append(f"{row.where}: {'nothing precedes the completion' if len(targets) else 'no completion'}")
        else:
            examples.append(Example(ids=np.array(ids, np.int32), targets=targets.astype(np.int32)))
    _refuse(problems, len(rows), file, "Correct, shorten or remove these rows; sft.max_tokens sets a lower limit.")
    return examples


def batch(step: int, rows: int, size: int, seed: int) -> list[int]:
    """The rows of a step, which begins with 1. The last batch of an epoch may be smaller.

    >>> [len(batch(step, 10, 4, seed=0)) for step in (1, 2, 3, 4)]
    [4, 4, 2, 4]
    >>> sorted(batch(4, 10, 4, seed=0) + batch(5, 10, 4, seed=0) + batch(6, 10, 4, seed=0)) == list(range(10))
    True
    """
    epoch, place = divmod(step - 1, steps_per_epoch(rows, size))
    return list(_order(epoch, rows, seed)[place * size : (place + 1) * size])


def steps_per_epoch(rows: int, size: int) -> int:
    return -(-rows // size)


@functools.lru_cache(maxsize=2)
def _order(epoch: int, rows: int, seed: int) -> Sequence[int]:
    order = list(range(rows))
    random.Random(f"sft/{seed}/{epoch}").shuffle(order)
    return order


def _refuse(problems: Sequence[str], rows: int, file: Path, fix: str) -> None:
    if problems:
        shown = "\n  ".join(problems[:SHOWN])
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        what = f"{len(problems)} of {rows} rows cannot be used:\n  {shown}{more}"
        raise WindfallError(what, where=str(file), fix=fix)


def _row(data: dict[str, Any], where: str) -> Row | str:
    """The row, or why it cannot be used."""
    try:
        json.dumps(data, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as e:
        return f"{e.object[e.start]!r} is half of a surrogate pair, which no text can have"
    if "messages" in data:
        messages = data["messages"]
        if wrong := _wrong_messages(messages, "messages"):
            return wrong
        if not any(message["role"] == "assistant" for message in messages):
            return "no message is from the assistant, so there is nothing to train on"
        tools = data.get("tools")
        if tools is not None and not isinstance(tools, list):
            return "'tools' is not a list"
        return Row(where=where, prompt=_without_nulls(messages), completion=None, tools=tools or None)
    if missing := [name for name in ("prompt", "completion") if name not in data]:
        return f"there is no column {missing[0]!r}: a row has 'messages', or 'prompt' and 'completion'"
    prompt, completion = data["prompt"], data["completion"]
    if isinstance(completion, list):
        if wrong := _wrong_messages(completion, "completion"):
            return wrong
        if [message["role"] for message in completion] != ["assistant"]:
            return "'completion' must be one message of the assistant; give a longer conversation as 'messages'"
        completion = completion[0]["content"]
    if not isinstance(completion, str) or not completion:
        return "'completion' is not a text"
    if isinstance(prompt, list):
        if wrong := _wrong_messages(prompt, "prompt"):
            return wrong
        return Row(where=where, prompt=_without_nulls(prompt), completion=completion)
    if not isinstance(prompt, str) or not prompt:
        return "'prompt' is neither a text nor a list of messages"
    return Row(where=where, prompt=prompt, completion=completion)


def _wrong_messages(messages: Any, name: str) -> str:
    """Why this is not a conversation; "" if it is one."""
    if not isinstance(messages, list) or not messages:
        return f"{name!r} is not a list of messages"
    for n, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"'{name}[{n}]' is not an object with text as 'role' and 'content'"
    return ""


def _without_nulls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A table gives every message all fields that any message has."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]
