"""Prompts from a data set as people have it (JSONL, parquet, Hugging Face folders), graded by any number of rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from windfall.envs.base import HELD_OUT
from windfall.envs.data.table import Format, Source, TableRow, labels, read_table
from windfall.envs.epochs import EpochOrder
from windfall.envs.held_out import Split, split_rows
from windfall.envs.rewards.weighted import GRADERS, Graded, Rewards
from windfall.errors import WindfallError
from windfall.types import Feedback, Prompt, Task, Turn


class Dataset:
    """`Dataset("gsm8k", subset="main", columns={"prompt": "question"}, rewards=["rewards.py:accuracy"])`.

    The order of every epoch is derived from `seed`. Tasks from HELD_OUT on are the evaluation rows, always in the same
    order: those of the data set in `evaluation`, or a share of the rows (held_out.py).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        split: str | None = None,
        subset: str | None = None,
        filter: str = "",
        columns: Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        instruction: str | None = None,
        answer_after: str | None = None,
        rewards: Sequence[str] = ("math",),
        reward_weights: Sequence[float] = (),
        held_out: float = 0.0,
        evaluation: Mapping[str, Any] | None = None,
        seed: int = 0,
        cpu_s: float = 5.0,
    ) -> None:
        source = Source(path=Path(path), split=split, subset=subset, filter=filter)
        form = Format(
            columns=columns or {},
            system_prompt=system_prompt,
            instruction=instruction,
            answer_after=answer_after,
            answer_needed=any(name in GRADERS for name in rewards),
        )
        self._split, self._seed = _split(source, form, evaluation, held_out), seed
        names = labels([*self._split.train[:100], *self._split.evaluation[:100]])
        self._rewards = Rewards(rewards, reward_weights, columns=names, cpu_s=cpu_s)
        self.needs_tokens = self._rewards.needs_tokens
        """Turns must come with their token ids."""
        self._order = EpochOrder(seed, len(self._split.train))

    def task(self, index: int) -> Task:
        if index >= HELD_OUT:
            row = self._split.evaluation[(index - HELD_OUT) % len(self._split.evaluation)]
        else:
            row = self._split.train[self._order.row(index)]
        return Task(id=f"{row.file.name}:{row.line}/{self._seed}/{index}", prompt=row.prompt, answer=row)

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        row: TableRow = task.answer
        text = turns[-1].text
        arguments = {name: [value] for name, value in row.columns.items()}
        arguments |= {"prompts": [row.prompt], "completions": [_completion(row.prompt, text)]}
        if self.needs_tokens:
            arguments["completion_ids"] = [list(turns[-1].tokens)]
        return await self._rewards.grade(Graded(text=text, answer=row.answer, arguments=arguments))


def _completion(prompt: Prompt, text: str) -> Any:
    """The response in the form of the prompt: text, or a list with one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def read_split(section: Any, evaluation: Mapping[str, Any] | None) -> Split[TableRow]:
    """The rows that an env section of windfall.recipe names. `evaluation`: a separate data set (hosting.py)."""
    source = Source(path=section.path, split=section.split, subset=section.subset, filter=section.filter)
    form = Format(
        columns=section.columns,
        system_prompt=section.system_prompt,
        instruction=section.instruction,
        answer_after=section.answer_after,
        answer_needed=any(name in GRADERS for name in section.rewards),
    )
    return _split(source, form, evaluation, section.held_out)


def _split(source: Source, form: Format, evaluation: Mapping[str, Any] | None, held_out: float) -> Split[TableRow]:
    try:
        rows = read_table(source, form)
    except MemoryError as e:
        fix = "Use fewer rows: set env.split = 'train[:100000]', or store only the columns that are needed."
        raise WindfallError("the rows do not fit into memory", where=str(source.path), fix=fix) from e
    if evaluation is None:
        return split_rows(rows, source.path, held_out=held_out, other="eval.path")
    other = Source(**{**evaluation, "path": Path(evaluation["path"]), "section": "eval"})
    return split_rows(rows, source.path, evaluation=read_table(other, form), eval_path=other.path)
