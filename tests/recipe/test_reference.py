"""The thirty keys that matter, and the recipes that `windfall new` writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from windfall.errors import WindfallError
from windfall.recipe import reference
from windfall.recipe.file import load_recipe
from windfall.run import cli


def run(*arguments: str) -> str:
    done = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def data(folder: Path, **row: str) -> Path:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps({k: v.format(n=n) for k, v in row.items()}) + "\n" for n in range(40)))
    return path


def test_thirty_keys_matter() -> None:
    keys = list(reference.main_keys())
    assert len(set(reference.MAIN)) == len(keys) == 30
    assert all(key.meaning for _, key in keys)


def test_new_recipe_passes_the_dry_run(tmp_path: Path) -> None:
    rows, path = data(tmp_path, question="{n}+1=", solution="{n}"), tmp_path / "recipe.toml"
    assert str(path) in run("new", "--model", "tiny", "--data", str(rows), str(path))
    made = load_recipe(path)
    assert (made.model.path, made.env.name, made.run.name) == ("tiny", "dataset", "tiny-sums")
    assert "nothing was started" in run("train", "--dry-run", str(path))
    with pytest.raises(WindfallError, match="already exists"):
        run("new", "--model", "tiny", "--data", str(rows), str(path))
    with pytest.raises(WindfallError, match="no column that looks like the prompt"):
        run("new", "--model", "tiny", "--data", str(data(tmp_path, x="1")))


def test_all_defaults_in_a_new_recipe_are_valid(tmp_path: Path) -> None:
    """Every key that is a comment can be used as it stands, except those without a default."""
    text = run("new", "--model", "some/model", "--data", str(data(tmp_path, prompt="{n}", answer="{n}")))
    keys = [line.removeprefix("# ") for line in text.splitlines() if " = " in line and not line.endswith("...")]
    wanted = [line for line in keys if line.split(" = ")[0].isidentifier() or line.startswith("[")]
    assert len(wanted) == 29, "all but train.lora"
    used = [line.removeprefix("# ") if line.removeprefix("# ") in wanted else line for line in text.splitlines()]
    path = tmp_path / "used.toml"
    path.write_text("\n".join(used))
    assert load_recipe(path).model.path == "some/model"


def test_keys_on_the_console() -> None:
    assert "rollout.max_tokens" in run("recipe")
    assert "clip_norm" in run("recipe", "train")
    assert "poll_s" in run("recipe", "fleet.slurm")
    assert "ingress_bytes_per_s" in run("recipe", "--all")
    with pytest.raises(WindfallError, match="unknown section or key 'rolout'"):
        run("recipe", "rolout")
