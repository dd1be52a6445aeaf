"""The commands: what they refuse, and how they say it. Runs from end to end are in test_runs.py."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from windfall import __version__, cli, config
from windfall.errors import WindfallError
from windfall.launch import supervisor, training

Windfall = Callable[..., tuple[int, str, str]]


def test_version_of_the_installed_command() -> None:
    for command in (["windfall"], ["python", "-m", "windfall.cli"]):
        path = str(Path(sys.executable).parent / command[0])
        done = subprocess.run([path, *command[1:], "--version"], capture_output=True, text=True, check=True)
        assert done.stdout == f"windfall {__version__}\n"


def commands(group: typer.core.TyperGroup, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if isinstance(command, typer.core.TyperGroup):
            yield from commands(command, *path, name)
        elif not command.hidden:
            yield (*path, name)


ROOT = typer.main.get_command(cli.app)
assert isinstance(ROOT, typer.core.TyperGroup)


@pytest.mark.parametrize("path", list(commands(ROOT)), ids=" ".join)
def test_help_has_an_example_that_is_right(path: tuple[str, ...]) -> None:
    command = ROOT
    for name in path:
        command = command.commands[name]  # pyright: ignore
    assert command.help
    assert (command.epilog or "").startswith("Example: windfall ")
    words = shlex.split(command.epilog.removeprefix("Example: windfall "))
    assert words[: len(path)] == list(path)
    command.make_context(path[-1], words[len(path) :])  # reads all options and arguments, runs nothing
    result = CliRunner().invoke(cli.app, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert command.epilog in result.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["train", "smal.toml"], "smal.toml: no such recipe file\nDid you mean 'small.toml'?"),
        (["train", "small.toml", "--set", "run.stps=3"], "unknown key 'run.stps'. Did you mean 'steps'?"),
        (["train", "small.toml", "--set", "steps"], "Write it as --set section.key=value."),
        (["train", "small.toml", "--set", "run.name=[/bold]"], "'run.name' = '[/bold]'"),
        (["train", "small.toml", "--set", "model.path=tinny"], "no model 'tinny'\nDid you mean 'tiny'?"),
        (["train", "small.toml", "--set", "model.path=."], "It must be in Hugging Face format."),
        (["train", "small.toml", "--set", "env={name='guess', low=9, high=3}"], "high must be more than low."),
        (
            ["train", "small.toml", "--set", "env={name='custom', factory='no_such:thing'}"],
            "env.factory: cannot import",
        ),
        (["train", "small.toml", "--set", "run.folder=small.toml"], "Set run.folder."),
        (["resume", "runs/small"], "runs/small: no such run"),
        (["resume", "smal"], "smal: no such run\nDid you mean 'small'?"),
        (["resume", "small"], "Give a folder such as runs/demo."),
        (["eval", "tiny"], "tiny: no recipe beside this checkpoint\nGive one with --recipe."),
        (["eval", "started"], "no checkpoint in this run"),
        (["generate", "tinny", "--prompt", "x"], "Did you mean 'tiny'?"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistake_is_refused_with_the_way_out(windfall: Windfall, here: Path, args: list[str], said: str) -> None:
    (here / "small").mkdir()
    (here / "started").mkdir()
    shutil.copy("small.toml", "started/recipe.toml")
    code, _, err = windfall(*args)
    assert code == 2
    assert said in err
    assert "Traceback" not in err
    assert not (here / "runs").exists()


@pytest.mark.parametrize("args", [["trian"], ["train"], ["train", "small.toml", "--sett", "a=1"], ["generate", "tiny"]])
def test_wrong_command_line(windfall: Windfall, args: list[str]) -> None:
    code, _, err = windfall(*args)
    assert code == 2
    assert "Traceback" not in err


def test_dry_run_prints_the_whole_recipe_and_does_nothing(windfall: Windfall, here: Path) -> None:
    code, out, _ = windfall("train", "small.toml", "--dry-run", "--set", "train.lr=3e-4")
    assert code == 0
    assert sorted(p.name for p in here.iterdir()) == ["small.toml"]
    (here / "printed.toml").write_text(out)
    assert config.load(here / "printed.toml") == config.load(here / "small.toml", ["train.lr=3e-4"])


def test_ctrl_c_before_there_is_anything_to_save(windfall: Windfall, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "train", interrupted)
    code, _, err = windfall("train", "small.toml")
    assert code == 130
    assert "Traceback" not in err


def test_more_tokens_than_the_models_context_are_refused(tmp_path: Path) -> None:
    from windfall import models

    recipe = config.parse({"rollout": {"max_tokens": 600}, "run": {"folder": str(tmp_path)}}, where="here")
    with pytest.raises(WindfallError, match="context of 512"):
        training.derive(recipe, models.load("tiny", dtype="float32", device="cpu"), "cpu", "float32", [20])
