"""Prompts from a data set as people have it (JSONL, parquet, Hugging Face folders), graded by any number of rewards."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.envs.base import HELD_OUT
from windfall.envs.data.table import DataSource, RowFormat, TableRow, labels, read_table
from windfall.envs.rewards import GRADERS, Rewards, RowResponse
from windfall.errors import WindfallError
from windfall.types import Feedback, Prompt, Task, Turn

FORM_KEYS = {"columns", "system_prompt", "instruction", "answer_after"}
DATA_KEYS = {"path", "rewards", "split", "subset", "held_out"} | FORM_KEYS
"""Keys of an env section that say what its rows are."""


class Dataset:
    """`Dataset("gsm8k", subset="main", columns={"prompt": "question"}, rewards=["rewards.py:accuracy"])`.

    The order of every epoch is derived from `seed`. Tasks from HELD_OUT on are the evaluation rows, always in the same
    order: those of the data set in `evaluation`, or a share of the rows.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rewards: Sequence[str] = ("math",),
        reward_weights: Sequence[float] = (),
        seed: int = 0,
        cpu_s: float = 5.0,
        **data: Any,
    ) -> None:
        """`data`: options of `read_data`."""
        self._seed = seed
        self._split = read_data(path, rewards=rewards, **data)
        names = labels([*self._split.train[:100], *self._split.evaluation[:100]])
        self._rewards = Rewards(rewards, reward_weights, columns=names, cpu_s=cpu_s)
        self.needs_tokens = self._rewards.needs_tokens

    def task(self, index: int) -> Task:
        if index >= HELD_OUT:
            row = self._split.evaluation[(index - HELD_OUT) % len(self._split.evaluation)]
        else:
            epoch, position = divmod(index, len(self._split.train))
            row = self._split.train[_epoch_order(self._seed, epoch, len(self._split.train))[position]]
        return Task(id=f"{row.file.name}:{row.line}/{self._seed}/{index}", prompt=row.prompt, answer=row)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        row: TableRow = task.answer
        text = turns[-1].text
        arguments = {name: [value] for name, value in row.columns.items()}
        arguments |= {"prompts": [row.prompt], "completions": [_completion(row.prompt, text)]}
        if self.needs_tokens:
            arguments["completion_ids"] = [list(turns[-1].tokens)]
        return await self._rewards.grade(RowResponse(text=text, answer=row.answer, arguments=arguments))


def _completion(prompt: Prompt, text: str) -> Any:
    """The response in the form of the prompt: text, or a list with one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplit:
    train: list[TableRow]
    evaluation: list[TableRow]
    """Each prompt occurs once."""
    trained_on: int
    """Number of evaluation rows that are also trained on."""


def read_split(section: Any, evaluation: Mapping[str, Any] | None = None) -> DataSplit:
    """The rows that an env section "dataset" of windfall.recipe names. `evaluation`: a separate data set
    (hosting.py)."""
    return read_data(evaluation=evaluation, **section.model_dump(include=DATA_KEYS))


def read_data(
    path: str | Path,
    *,
    rewards: Sequence[str] = ("math",),
    split: str | None = None,
    subset: str | None = None,
    held_out: float = 0.0,
    evaluation: Mapping[str, Any] | None = None,
    **form: Any,
) -> DataSplit:
    """Read the rows of a data set. The arguments are keys of the recipe. `evaluation`: fields of a DataSource with
    separate rows for evaluation. `form`: fields of RowFormat."""
    source = DataSource(path=Path(path), split=split, subset=subset)
    compared = any(name in GRADERS for name in rewards)
    row_format = RowFormat(**form, answer_needed=compared, mathematics="math" in rewards)
    try:
        rows = read_table(source, row_format)
    except MemoryError as e:
        fix = "Use fewer rows: set env.split = 'train[:100000]', or store only the columns that are needed."
        raise WindfallError("the rows do not fit into memory", where=str(path), fix=fix) from e
    if evaluation is None:
        return _split(rows, held_out, source.path)
    other = DataSource(**{**evaluation, "path": Path(evaluation["path"]), "section": "eval"})
    separate, known = _distinct(read_table(other, row_format)), {row.key for row in rows}
    return DataSplit(train=rows, evaluation=separate, trained_on=sum(row.key in known for row in separate))


def _split(rows: list[TableRow], held_out: float, path: Path) -> DataSplit:
    """Split the rows by a hash of the prompt: adding rows never moves other rows, and rows with the same prompt stay
    together. Without `held_out`, the evaluation uses the training rows."""
    if not held_out:
        evaluation = _distinct(rows)
        return DataSplit(train=rows, evaluation=evaluation, trained_on=len(evaluation))
    key_limit = int(held_out * 2**64)  # keys are spread evenly from 0 to 2**64
    train = [row for row in rows if row.key >= key_limit]
    evaluation = _distinct([row for row in rows if row.key < key_limit])
    if not train or not evaluation:
        purpose = "to evaluate on" if train else "to train on"
        what = f"env.held_out = {held_out:g} leaves none of the {len(_distinct(rows))} different prompts {purpose}"
        fix = "Change env.held_out, or evaluate on a separate data set (eval.path)."
        raise WindfallError(what, where=str(path), fix=fix)
    return DataSplit(train=train, evaluation=evaluation, trained_on=0)


def _distinct(rows: list[TableRow]) -> list[TableRow]:
    """Each prompt once, sorted by hash: the first n rows are a fair sample, and always the same."""
    first: dict[int, TableRow] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return [first[key] for key in sorted(first)]


@functools.lru_cache(maxsize=2)  # responses of the last epoch may still be running when the next one begins
def _epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The row of every position in this epoch."""

    def key(row: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{row}".encode(), digest_size=8).digest()

    return sorted(range(count), key=key)
