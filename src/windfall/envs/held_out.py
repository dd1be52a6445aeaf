"""Selects and describes the tasks of an evaluation. Results are comparable only for the same tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from windfall.envs.rows import DataRow, read
from windfall.errors import WindfallError

Row = TypeVar("Row", bound=DataRow)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A description of the tasks of an evaluation."""

    tasks: int
    """Number of tasks that are evaluated, each once."""
    description: str
    """Completes the sentence "reward 0.5 on ..."."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Split(Generic[Row]):
    """Rows for training, and rows for evaluation."""

    train: list[Row]
    evaluation: list[Row]
    """Each prompt occurs once."""
    file: Path
    """The file with the evaluation rows."""
    trained_on: int
    """Number of evaluation rows that are also trained on."""


def split(
    path: Path, prompt_field: str, answer_field: str, *, eval_path: Path | None = None, held_out: float = 0.0
) -> Split[DataRow]:
    """Split the rows of a JSONL file; see `split_rows`."""
    rows = read(path, prompt_field, answer_field)
    evaluation = read(eval_path, prompt_field, answer_field) if eval_path is not None else None
    return split_rows(rows, path, evaluation=evaluation, eval_path=eval_path, held_out=held_out)


def split_rows(
    rows: list[Row],
    path: Path,
    *,
    evaluation: list[Row] | None = None,
    eval_path: Path | None = None,
    held_out: float = 0.0,
    other: str = "env.eval_path",
) -> Split[Row]:
    """Split the rows by separate evaluation rows, or by a hash of the prompt: adding rows never moves other rows, and
    rows with the same prompt stay together. Without either, the evaluation uses the training rows. `other`: the key
    of the recipe that names separate rows."""
    if evaluation is not None:
        evaluation, known = _distinct(evaluation), {row.key for row in rows}
        trained_on = sum(row.key in known for row in evaluation)
        return Split(train=rows, evaluation=evaluation, file=eval_path or path, trained_on=trained_on)
    if not held_out:
        evaluation = _distinct(rows)
        return Split(train=rows, evaluation=evaluation, file=path, trained_on=len(evaluation))
    key_limit = int(held_out * 2**64)  # keys are spread evenly from 0 to 2**64
    train = [row for row in rows if row.key >= key_limit]
    evaluation = _distinct([row for row in rows if row.key < key_limit])
    if not train or not evaluation:
        purpose = "to evaluate on" if train else "to train on"
        what = f"env.held_out = {held_out:g} leaves none of the {len(_distinct(rows))} different prompts {purpose}"
        fix = f"Change env.held_out, or set {other} to a separate data set."
        raise WindfallError(what, where=str(path), fix=fix)
    return Split(train=train, evaluation=evaluation, file=path, trained_on=0)


def _distinct(rows: list[Row]) -> list[Row]:
    """Each prompt once, sorted by hash: the first n rows are a fair sample, and always the same."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return [first[key] for key in sorted(first)]


def describe(section: Any, tasks: int, evaluation: dict[str, Any] | None = None) -> HeldOut:
    """Describe the evaluation. `section` is an env section of windfall.recipe; `tasks` is the requested number;
    `evaluation` names a separate data set (hosting.evaluation_data)."""
    if getattr(section, "tasks", None) is not None:
        return describe(section.tasks, tasks, evaluation)
    if section.name not in ("jsonl", "dataset"):
        source = f" of {section.factory}, numbered from 2^40 on" if section.name == "custom" else f" of {section.name}"
        return HeldOut(tasks=tasks, description=f"{tasks} held-out tasks{source}")
    if tasks == 0:
        return HeldOut(tasks=0, description="nothing")
    if section.name == "dataset":
        from windfall.envs.dataset import read_split

        s, other = read_split(section, evaluation), "eval.path or eval.split"
        name, trained = _label(section.path, section.split, evaluation), section.path.name
    else:
        s = split(
            section.path,
            section.prompt_field,
            section.answer_field,
            eval_path=section.eval_path,
            held_out=section.held_out,
        )
        name, trained, other = s.file.name, section.path.name, "env.eval_path"
    separate = evaluation is not None or getattr(section, "eval_path", None) is not None
    return _describe_split(s, tasks, name, trained, other, separate=separate, held_out=bool(section.held_out))


def _label(path: Path, split: str | None, evaluation: dict[str, Any] | None) -> str:
    """The data set of the evaluation in one word: "test.parquet", "gsm8k/test"."""
    if evaluation is not None:
        path, split = Path(evaluation["path"]), evaluation.get("split")
    return path.name if path.is_file() or not split else f"{path.name}/{split}"


def _describe_split(
    s: Split[Any], tasks: int, name: str, trained: str, other: str, *, separate: bool, held_out: bool
) -> HeldOut:
    available = len(s.evaluation)
    count = min(tasks, available)
    rows, warnings = (f"{count}" if count == available else f"{count} of {available}"), []
    if tasks > available:
        warnings.append(f"the evaluation needs {tasks} tasks, but {name} has only {available}: each is used once")
    if s.trained_on == 0:
        description = f"{rows} held-out rows of {name}" if held_out else f"{rows} rows of {name}"
    elif not separate:
        description = f"{rows} training rows of {name} (no held-out set given)"
        warnings.append(
            f"the evaluation uses training rows of {name}, so its result says nothing about new tasks; set "
            f"{other} to another file, or env.held_out to a share of the rows"
        )
    else:
        description = f"{rows} rows of {name} ({s.trained_on} of the {available} are also trained on)"
        warnings.append(f"{s.trained_on} of {available} prompts of {name} are also in {trained}")
    return HeldOut(tasks=count, description=description, warnings=tuple(warnings))
