"""Describes the tasks of an evaluation. Results are comparable only for the same tasks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windfall.envs.dataset import read_split


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationTasks:
    tasks: int
    description: str
    """Completes the sentence "reward 0.5 on ..."."""
    warnings: tuple[str, ...] = ()


def describe(section: Any, tasks: int, evaluation: dict[str, Any] | None = None) -> EvaluationTasks:
    """Describe the evaluation. `section` is an env section of windfall.recipe; `tasks` is the requested number;
    `evaluation` names a separate data set (hosting.evaluation_data)."""
    given = section.tasks if section.name == "agent" else None
    if given is not None:
        return describe(given, tasks, evaluation)
    if section.name != "dataset":
        source = section.factory if section.name == "custom" else section.name
        return EvaluationTasks(tasks=tasks, description=f"{tasks} held-out tasks of {source}")
    if tasks == 0:
        return EvaluationTasks(tasks=0, description="nothing")
    split = read_split(section, evaluation)
    name = _label(section.path, section.split, evaluation)
    available = len(split.evaluation)
    count = min(tasks, available)
    rows, warnings = (f"{count}" if count == available else f"{count} of {available}"), []
    if tasks > available:
        warnings.append(f"the evaluation needs {tasks} tasks, but {name} has only {available}: each is used once")
    if split.trained_on == 0:
        description = f"{rows} held-out rows of {name}" if section.held_out else f"{rows} rows of {name}"
    elif evaluation is None:
        description = f"{rows} training rows of {name} (no held-out set given)"
        warnings.append(
            f"the evaluation uses training rows of {name}, so its result says nothing about new tasks; set "
            "eval.path or eval.split, or env.held_out to a share of the rows"
        )
    else:
        description = f"{rows} rows of {name} ({split.trained_on} of the {available} are also trained on)"
        warnings.append(f"{split.trained_on} of {available} prompts of {name} are also in {section.path.name}")
    return EvaluationTasks(tasks=count, description=description, warnings=tuple(warnings))


def _label(path: Path, split: str | None, evaluation: dict[str, Any] | None) -> str:
    """The data set of the evaluation in one word: "test.parquet", "gsm8k/test"."""
    if evaluation is not None:
        path, split = Path(evaluation["path"]), evaluation.get("split")
    return path.name if path.is_file() or not split else f"{path.name}/{split}"
