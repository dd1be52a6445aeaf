"""Selects and describes the tasks of an evaluation. Results are comparable only for the same tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.envs.rows import DataRow, read
from windfall.errors import WindfallError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A description of the tasks of an evaluation."""

    tasks: int
    """Number of tasks that are evaluated, each once."""
    description: str
    """Completes the sentence "reward 0.5 on ..."."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Rows for training, and rows for evaluation."""

    train: list[DataRow]
    evaluation: list[DataRow]
    """Each prompt occurs once."""
    file: Path
    """The file with the evaluation rows."""
    trained_on: int
    """Number of evaluation rows that are also trained on."""


def split(
    path: Path, prompt_field: str, answer_field: str, *, eval_path: Path | None = None, held_out: float = 0.0
) -> Split:
    """Split the rows by a separate evaluation file, or by a hash of the prompt: adding rows never moves other rows, and
    rows with the same prompt stay together. Without either, the evaluation uses the training rows."""
    rows = read(path, prompt_field, answer_field)
    if eval_path is not None:
        evaluation, known = _distinct(read(eval_path, prompt_field, answer_field)), {row.key for row in rows}
        trained_on = sum(row.key in known for row in evaluation)
        return Split(train=rows, evaluation=evaluation, file=eval_path, trained_on=trained_on)
    if not held_out:
        evaluation = _distinct(rows)
        return Split(train=rows, evaluation=evaluation, file=path, trained_on=len(evaluation))
    key_limit = int(held_out * 2**64)  # keys are spread evenly from 0 to 2**64
    train = [row for row in rows if row.key >= key_limit]
    evaluation = _distinct([row for row in rows if row.key < key_limit])
    if not train or not evaluation:
        purpose = "to evaluate on" if train else "to train on"
        what = f"env.held_out = {held_out:g} leaves none of the {len(_distinct(rows))} different prompts {purpose}"
        fix = "Change env.held_out, or set env.eval_path to a separate file."
        raise WindfallError(what, where=str(path), fix=fix)
    return Split(train=train, evaluation=evaluation, file=path, trained_on=0)


def _distinct(rows: list[DataRow]) -> list[DataRow]:
    """Each prompt once, sorted by hash: the first n rows are a fair sample, and always the same."""
    first: dict[int, DataRow] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return [first[key] for key in sorted(first)]


def describe(section: Any, tasks: int) -> HeldOut:
    """Describe the evaluation. `section` is an env section of windfall.config; `tasks` is the requested number."""
    if getattr(section, "tasks", None) is not None:
        return describe(section.tasks, tasks)
    if section.name != "jsonl":
        source = f" of {section.factory}, numbered from 2^40 on" if section.name == "custom" else f" of {section.name}"
        return HeldOut(tasks=tasks, description=f"{tasks} held-out tasks{source}")
    if tasks == 0:
        return HeldOut(tasks=0, description="nothing")
    s = split(
        section.path, section.prompt_field, section.answer_field, eval_path=section.eval_path, held_out=section.held_out
    )
    available, name = len(s.evaluation), s.file.name
    count = min(tasks, available)
    rows, warnings = (f"{count}" if count == available else f"{count} of {available}"), []
    if tasks > available:
        warnings.append(f"the evaluation needs {tasks} tasks, but {name} has only {available}: each is used once")
    if s.trained_on == 0:
        description = f"{rows} held-out rows of {name}" if section.held_out else f"{rows} rows of {name}"
    elif section.eval_path is None:
        description = f"{rows} training rows of {name} (no held-out set given)"
        warnings.append(
            f"the evaluation uses training rows of {name}, so its result says nothing about new tasks; set "
            "env.eval_path to another file, or env.held_out to a share of the rows"
        )
    else:
        description = f"{rows} rows of {name} ({s.trained_on} of the {available} are also trained on)"
        warnings.append(f"{s.trained_on} of {available} prompts of {name} are also in {section.path.name}")
    return HeldOut(tasks=count, description=description, warnings=tuple(warnings))
