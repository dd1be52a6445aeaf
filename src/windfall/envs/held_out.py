"""What an evaluation is measured on, in words and in number: a figure without that says nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.envs.rows import DataRow, read
from windfall.errors import WindfallError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    tasks: int
    """How many are evaluated, each once."""
    what: str
    """To be put after "reward 0.5 on"."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Rows to train on, and rows to evaluate on, each prompt once."""

    train: list[DataRow]
    evaluation: list[DataRow]
    file: Path
    """Whose rows the latter are."""
    trained_on: int
    """How many of them are trained on as well."""


def split(
    path: Path, prompt_field: str, answer_field: str, *, eval_path: Path | None = None, held_out: float = 0.0
) -> Split:
    """By a file of its own, or by a hash of the prompt: what a row is for never changes when others are added, and rows
    with the same prompt are for the same. Without either, evaluation is on rows that are trained on."""
    rows = read(path, prompt_field, answer_field)
    if eval_path is not None:
        apart = _distinct(read(eval_path, prompt_field, answer_field))
        known = {row.key for row in rows}
        return Split(train=rows, evaluation=apart, file=eval_path, trained_on=sum(row.key in known for row in apart))
    if not held_out:
        apart = _distinct(rows)
        return Split(train=rows, evaluation=apart, file=path, trained_on=len(apart))
    edge = int(held_out * 2**64)
    train, apart = [row for row in rows if row.key >= edge], _distinct([row for row in rows if row.key < edge])
    if not train or not apart:
        left = "to evaluate on" if train else "to train on"
        raise WindfallError(
            f"held_out = {held_out:g} of {len(_distinct(rows))} different prompts leaves none {left}",
            where=str(path), fix="Change env.held_out, or give a file of its own with env.eval_path.",
        )  # fmt: skip
    return Split(train=train, evaluation=apart, file=path, trained_on=0)


def _distinct(rows: list[DataRow]) -> list[DataRow]:
    """Each prompt once, in the order of their hashes: the first so many are a fair sample, and always the same."""
    first: dict[int, DataRow] = {}
    for row in rows:
        first.setdefault(row.key, row)
    return [first[key] for key in sorted(first)]


def describe(section: Any, tasks: int) -> HeldOut:
    """`section` is one of the env sections of windfall.config; `tasks` is how many were asked for."""
    if section.name != "jsonl":
        own = f" of {section.factory}, numbered from 2^40 on" if section.name == "custom" else f" of {section.name}"
        return HeldOut(tasks=tasks, what=f"{tasks} held-out tasks{own}")
    if tasks == 0:
        return HeldOut(tasks=0, what="nothing")
    s = split(
        section.path, section.prompt_field, section.answer_field, eval_path=section.eval_path, held_out=section.held_out
    )
    there, name = len(s.evaluation), s.file.name
    count = min(tasks, there)
    rows, warnings = (f"{count}" if count == there else f"{count} of {there}"), []
    if tasks > there:
        warnings.append(f"{tasks} tasks of {name} are to be evaluated, and it has {there} for that: each is used once")
    if s.trained_on == 0:
        what = f"{rows} held-out rows of {name}" if section.held_out else f"{rows} rows of {name}"
    elif section.eval_path is None:
        what = f"{rows} training rows of {name} (no held-out set given)"
        warnings.append(
            f"the evaluation uses rows of {name} that are trained on, so its figure says nothing about new tasks; set "
            "env.eval_path to another file, or env.held_out to a share of the rows"
        )
    else:
        what = f"{rows} rows of {name} ({s.trained_on} of the {there} are trained on, too)"
        warnings.append(f"{s.trained_on} of {there} prompts of {name} are in {section.path.name}, too")
    return HeldOut(tasks=count, what=what, warnings=tuple(warnings))
