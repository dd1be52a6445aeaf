"""The environment over a data set: which rows are trained on and evaluated, and what a run says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windfall import envs, run_folder
from windfall.envs.base import HELD_OUT
from windfall.envs.dataset import Dataset
from windfall.envs.held_out import describe
from windfall.envs.hosting import evaluation_data
from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run import resume_check


def write(path: Path, first: int, count: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{n}+0=", "answer": n} for n in range(first, first + count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "sums" / "train.jsonl", 0, 20)
    write(tmp_path / "sums" / "test.jsonl", 100, 6)
    return tmp_path / "sums"


def recipe(env: dict[str, Any], **evaluation: Any) -> Recipe:
    return parse_recipe({"env": {"name": "dataset", "rewards": ["exact"]} | env, "eval": evaluation}, where="test")


def prompts(r: Recipe, first: int, count: int) -> list[str]:
    options = {k: v for k, v in envs.section_dict(r.env).items() if k != "name"}
    env = Dataset(**options, evaluation=evaluation_data(r))
    return [str(env.task(first + n).prompt) for n in range(count)]


def test_every_epoch_has_every_row_and_evaluation_has_its_own(folder: Path) -> None:
    r = recipe({"path": str(folder)}, split="test", tasks=9)
    epochs = [prompts(r, 20 * n, 20) for n in range(2)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"{n}+0=" for n in range(20))
    assert sorted(prompts(r, HELD_OUT, 6)) == [f"{n}+0=" for n in range(100, 106)]
    said = describe(r.env, 9, evaluation_data(r))
    assert (said.tasks, said.description) == (6, "6 rows of sums/test")
    assert "has only 6" in said.warnings[0]


def test_the_evaluation_has_its_own_path(folder: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", 18, 4)
    r = recipe({"path": str(folder)}, path=str(other))
    assert sorted(prompts(r, HELD_OUT, 4)) == ["18+0=", "19+0=", "20+0=", "21+0="]
    said = describe(r.env, 64, evaluation_data(r))
    assert said.description == "4 rows of other.jsonl (2 of the 4 are also trained on)"


@pytest.mark.parametrize("section", ["env", "eval"])
def test_a_filter_is_refused_with_what_to_do_instead(folder: Path, section: str) -> None:
    env, evaluation = ({"filter": "even"}, {}) if section == "env" else ({}, {"filter": "even"})
    with pytest.raises(WindfallError, match=rf"{section}.filter.*\n?.*to_parquet"):
        recipe({"path": str(folder), **env}, **evaluation)


def test_held_out_rows_are_not_trained_on(folder: Path) -> None:
    r = recipe({"path": str(folder / "train.jsonl"), "held_out": 0.3})
    said = describe(r.env, 64, evaluation_data(r))
    held = set(prompts(r, HELD_OUT, said.tasks))
    assert 0 < len(held) < 20
    assert not held & set(prompts(r, 0, 40))
    assert said.description == f"{len(held)} held-out rows of train.jsonl"
    plain = recipe({"path": str(folder / "train.jsonl")})
    assert "set eval.path or eval.split" in describe(plain.env, 64, evaluation_data(plain)).warnings[-1]
    with pytest.raises(WindfallError, match=r"set eval.split or env.held_out, not both"):
        recipe({"path": str(folder), "held_out": 0.3}, split="test")


def test_a_run_is_not_resumed_with_other_rows(folder: Path, tmp_path: Path) -> None:
    r = run_folder.with_absolute_paths(recipe({"path": str(folder)}, split="test"))
    resume_check.check_data(r, tmp_path)
    write(folder / "test.jsonl", 200, 3)  # the evaluation may change
    resume_check.check_data(r, tmp_path)
    write(folder / "train.jsonl", 0, 21)
    with pytest.raises(WindfallError, match="660 bytes before, 694 now"):
        resume_check.check_data(r, tmp_path)
