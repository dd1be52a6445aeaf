"""The commands: what they refuse, and with which message. End-to-end runs are in test_runs.py."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from tests.support.hostile.files import DAMAGES, damage
from windfall import __version__
from windfall.errors import WindfallError
from windfall.link import invitation
from windfall.models import load
from windfall.recipe.file import load_recipe, parse_recipe
from windfall.run import cli, start
from windfall.trainer import derived

Windfall = Callable[..., tuple[int, str, str]]


def test_installed_command_prints_its_version() -> None:
    for command in (["windfall"], ["python", "-m", "windfall.run.cli"]):
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
def test_help_has_a_valid_example(path: tuple[str, ...]) -> None:
    command = ROOT
    for name in path:
        command = command.commands[name]  # pyright: ignore
    assert command.help
    assert (command.epilog or "").startswith("Example: windfall ")
    words = shlex.split(command.epilog.removeprefix("Example: windfall "))
    assert words[: len(path)] == list(path)
    command.make_context(path[-1], words[len(path) :])  # parses all options and arguments, runs nothing
    result = CliRunner().invoke(cli.app, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert command.epilog in result.output
    for text in (command.help, *(getattr(p, "help", None) or "" for p in command.params)):
        brackets = set(re.findall(r"\[[^]]*\]", text)) - {"[b]", "[/b]"}
        assert all(b in Text.from_markup(text).plain for b in brackets), f"rich takes a part of this for markup: {text}"


def test_help_shows_the_commands_in_the_order_in_which_a_user_meets_them() -> None:
    out = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"}).output
    shown = [name for name in re.findall(r"^│ ([a-z][\w-]*) ", out, re.MULTILINE) if not name.startswith("-")]
    assert sorted(shown) == sorted({path[0] for path in commands(ROOT)})
    assert [*shown[:4], *shown[-3:]] == ["demo", "examples", "doctor", "new", "env-server", "serve", "fleet"]
    result = shown.index("eval")
    assert shown[result - 2 : result + 4] == ["top", "page", "eval", "generate", "export", "push"]


@pytest.mark.parametrize(
    ("asked", "option"), [(["help"], ["--help"]), (["help", "fleet", "preview"], ["fleet", "preview", "--help"])]
)
def test_help_as_a_command_is_the_option(asked: list[str], option: list[str]) -> None:
    shown = CliRunner().invoke(cli.app, asked)
    assert (shown.exit_code, shown.output) == (0, CliRunner().invoke(cli.app, option).output)


@pytest.mark.slow
def test_a_shell_completes_commands_and_options() -> None:
    """What `windfall --install-completion` lets the shell call at each press of the key."""
    for line, word, expected in (("windfall tr", 1, {"train", "trainer"}), ("windfall train --dry", 2, {"--dry-run"})):
        variables = {"_WINDFALL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(word)}
        command = [sys.executable, "-m", "windfall.run.cli"]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)
        assert set(done.stdout.split()) == expected, done.stderr


def test_error_shows_an_extra_in_brackets(windfall: Windfall, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = windfall("train", "small.toml", "--set", "log.wandb=project")
    assert (code, "[wandb]'" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["train", "smal.toml"], "smal.toml: no such recipe file\nDid you mean 'small.toml'?"),
        (["train", "small.toml", "--set", "run.stps=3"], "unknown key 'run.stps'. Did you mean 'steps'?"),
        (["train", "small.toml", "--set", "steps"], "Write it as --set section.key=value."),
        (["train", "small.toml", "--set", "run.name=[/bold]"], "'run.name' = '[/bold]'"),
        (["train", "small.toml", "--set", "model.path=tinny"], "no model 'tinny'\nDid you mean 'tiny'?"),
        (["train", "small.toml", "--set", "model.path=."], "It must be in Hugging Face format."),
        (
            [
                "train",
                "small.toml",
                "--set",
                "env={name='custom', factory='examples.guess:Guess', options={low=9, high=3}}",
            ],
            "high must be greater than low.",
        ),
        (
            ["train", "small.toml", "--set", "env={name='custom', factory='no_such:thing'}"],
            "env.factory: cannot import",
        ),
        (["train", "small.toml", "--set", "run.folder=small.toml"], "Not a directory\nSet run.folder to a folder"),
        (["resume", "runs/small"], "runs/small: no such run"),
        (["resume", "startd"], "startd: no such run\nDid you mean 'started'?"),
        (["resume", "small"], "Give a folder such as runs/demo."),
        (["eval", "tiny"], "tiny: this checkpoint has no recipe\nGive one with --recipe."),
        (["eval", "started"], "no checkpoint in this run"),
        (["eval", "./startd"], "no such folder\nDid you mean 'started'?"),
        (["eval", "small/startd"], "small/startd: no such folder\nDid you mean 'small/started'?"),
        (["generate", "tinny", "--prompt", "x"], "Did you mean 'tiny'?"),
        (["generate", "tiny", "--prompt", ""], "--prompt: the prompt has no tokens"),
        (["train", "small.toml", "--set", "model.path="], "no model ''\nKnown: smollm2-135m, tiny."),
        (["push", "nosuch", "a/b"], "nosuch: no such run"),
        (["new", "--model", "tiny", "--data", "no.jsonl"], "no.jsonl: no such file or folder\nGive a JSONL or"),
        (["train", "empty.toml"], "empty.toml: the recipe is empty"),
        (["train", "small"], "small: this is a folder, not a recipe"),
        (["train", "binary.toml"], "binary.toml: not valid TOML: the file is not UTF-8 text"),
        (["train", "small.toml", "--set", "train.lr=1e400"], "'train.lr' = inf"),
        (["train", "small.toml", "--set", "rollout.temperature=inf"], "'rollout.temperature' = inf"),
        (["train", "small.toml", "--set", "rollout.group_size=1"], "works with single responses: reinforce_pp."),
        (["train", "small.toml", "--set", "rollout.group_size=1", "--set", "algorithm.name=dapo"], "dapo compares the"),
        (["train", "small.toml", "--token", "no.such"], "--token no.such: no such token file"),
        (["train", "small.toml", "--max-usd", "40"], "--max-usd: only for a job of a service\nAdd --on"),
        (["train", "small.toml", "--share", "2", "--dry-run"], "--share: only for a job of a service"),
        (["resume", "started", "--max-usd", "0"], "--max-usd: only for a job of a service"),
        (["train", "x.toml"], "x.toml: no such recipe file\nKnown: binary.toml, empty.toml, small.toml."),
        (["train", "smal.toml"], "Did you mean 'small.toml'?"),
        (["recipe", "train.lrr"], "unknown section or key 'train.lrr'\nDid you mean 'train.lr'?"),
        (["sft", "no.jsonl"], "no.jsonl: no such file\nGive a JSONL or parquet file."),
        (["plan", "8B", "--gpus", "8xH100", "--objective", "x"], "value 'x'\nKnown: cost, deadline, throughput."),
        (["train", "small.toml", "--token", "short.token"], "short.token: not a token"),
        (["train", "small.toml", "--token", "binary.toml"], "binary.toml: not a token"),
        (["train", "small.toml", "--token", "small"], "small: the token cannot be read: Is a directory\nGive a file"),
        (["train", "small.toml", "--token", ""], "--token: the token is empty"),
        (["token", "small.toml"], "small.toml: this file already exists"),
        (["token", "nowhere/x"], "cannot write the token: No such file or directory\nCreate its folder first"),
        (["worker", "--join", "http://", "--token", "x"], "'http://' is not the address of a controller"),
        (["worker", "--join", "http://h:99999", "--token", "x"], "'http://h:99999' is not the address of a controller"),
        (["worker", "--join", "http://h:1", "--token", "no.such", "--patience", "1"], "waited 1 s for this token file"),
        (["worker", "--join", "http://h:1", "--token", "x", "--device", "cuda:one"], "unknown value 'cuda:one'"),
        (["resume", "short.token"], "short.token: this is a file, not a run"),
        (["top", "short.token"], "short.token: this is a file, not a run"),
        (["trian", "small.toml"], "windfall: unknown command 'trian'\nDid you mean 'train'?"),
        (["training"], "windfall: unknown command 'training'\nDid you mean 'train'?"),
        (["train"], "windfall train: missing argument 'RECIPE.toml'\n`windfall train --help` says what it takes."),
        (["train", "small.toml", "--dryrun"], "windfall train: no such option: --dryrun\nDid you mean '--dry-run'?"),
        (["train", "small.toml", "other.toml"], "windfall train: got unexpected extra argument"),
        (["worker", "--lease", "rented"], "invalid value for '--lease': 'rented' is not one of 'reserved', 'spot'"),
        (["fleet", "preveiw"], "windfall fleet: no such command 'preveiw'"),
        (["export", "startd"], "startd: no such run\nDid you mean 'started'?"),
        (["page", "startd"], "startd: no such run\nDid you mean 'started'?"),
        (["resume", "x" * 300], "File name too long"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistake_is_refused_with_a_fix(windfall: Windfall, here: Path, args: list[str], expected: str) -> None:
    (here / "small").mkdir()
    (here / "started").mkdir()
    (here / "small" / "started").mkdir()
    (here / "empty.toml").write_text("# nothing yet\n")
    (here / "binary.toml").write_bytes(bytes(range(128, 256)))
    (here / "short.token").write_text("abc\n")
    shutil.copy("small.toml", "started/recipe.toml")
    code, _, err = windfall(*args)
    assert code == 2
    assert expected in err
    assert "Traceback" not in err
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "begun"],
        ["generate", "begun", "--prompt", "1+1="],
        ["export", "begun"],
        ["push", "begun", "me/begun", "--dry-run"],
        ["top", "begun", "--once"],
        ["page", "begun"],
        ["plan", "tiny", "--check", "begun"],
        ["plan", "small.toml", "--gpus", "1xH100", "--measured", "begun"],
    ],
    ids=lambda args: " ".join(args),
)
def test_run_is_found_by_its_name_alone(windfall: Windfall, here: Path, args: list[str]) -> None:
    run = here / "runs" / "begun"
    run.mkdir(parents=True)
    shutil.copy("small.toml", run / "recipe.toml")
    code, _, err = windfall(*args)
    assert code == 2
    assert err.startswith("error runs/begun: ")


def test_group_size_1_is_accepted_if_the_algorithm_supports_it(windfall: Windfall) -> None:
    one = ["--set", "rollout.group_size=1", "--set", "algorithm.name=reinforce_pp"]
    assert windfall("train", "small.toml", "--dry-run", *one)[0] == 0


@pytest.mark.parametrize("kind", sorted(DAMAGES))
@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_model_is_refused_by_name(windfall: Windfall, here: Path, file: str, kind: str) -> None:
    shutil.copytree(load.TINY, here / "model")
    damage(here / "model" / file, kind)
    code, _, err = windfall("generate", "model", "--prompt", "1+1=")
    assert code == 2
    assert "error model: " in err
    assert "Traceback" not in err


def test_prompt_that_is_too_long_is_refused(windfall: Windfall) -> None:
    code, _, err = windfall("generate", "tiny", "--prompt", "1+" * 600)
    assert code == 2
    assert "the model's context of 512" in err
    assert "rollout.max_tokens" not in err  # there is no recipe


def test_new_token_is_readable_by_its_owner_only(windfall: Windfall, here: Path) -> None:
    code, out, _ = windfall("token", "my.token")
    assert code == 0
    assert (here / "my.token").stat().st_mode & 0o777 == 0o600
    assert (here / "my.token").read_text() not in out


@pytest.mark.parametrize("by", ["option", "variable", "file"])
def test_token_on_the_command_line_gives_a_warning(
    windfall: Windfall, here: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr("windfall.worker.process.main", lambda url, token, **_: used.append(token))
    used: list[str] = []
    secret = "0123456789-abcdef"
    (here / "my.token").write_text(secret + "\n")
    if by == "variable":
        monkeypatch.setenv("WINDFALL_TOKEN", secret)
    given = {"option": ["--token", secret], "variable": [], "file": ["--token", "my.token"]}[by]
    code, _, err = windfall("worker", "--join", "http://127.0.0.1:1", *given)
    assert code == 0
    assert invitation.token(*used) == secret
    assert ("every user of this machine can read this token" in err) == (by == "option")


@pytest.mark.parametrize("args", [["trian"], ["train"], ["train", "small.toml", "--sett", "a=1"], ["generate", "tiny"]])
def test_invalid_command_line_is_refused(windfall: Windfall, args: list[str]) -> None:
    code, _, err = windfall(*args)
    assert code == 2
    assert "Traceback" not in err


def test_dry_run_prints_the_recipe_and_starts_nothing(windfall: Windfall, here: Path) -> None:
    code, out, _ = windfall("train", "small.toml", "--dry-run", "--set", "train.lr=3e-4")
    assert code == 0
    assert sorted(p.name for p in here.iterdir()) == ["small.toml"]
    (here / "printed.toml").write_text(out)
    assert "# not checked: whether the weights of the model can be loaded" in out
    assert load_recipe(here / "printed.toml") == load_recipe(here / "small.toml", ["train.lr=3e-4"])
    assert "weight_decay" not in out


def test_dry_run_does_not_claim_that_the_hub_has_the_model(windfall: Windfall) -> None:
    _, out, _ = windfall("train", "small.toml", "--dry-run", "--set", "model.path=me/mine")
    assert "# not checked: whether the hub has me/mine, " in out


def test_recipe_prints_one_key(windfall: Windfall) -> None:
    code, out, _ = windfall("recipe", "train.lr")
    assert (code, [line.split()[0] for line in out.split("\n") if line]) == (0, ["[train]", "key", "lr"])
    assert all(heading in windfall("recipe", "temperature")[1] for heading in ("[rollout]", "[eval]"))


def test_ctrl_c_during_the_imports_ends_with_status_130(tmp_path: Path) -> None:
    code = (
        "import builtins, sys; from windfall.__main__ import main; find = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name.startswith('windfall.run'): raise KeyboardInterrupt\n"
        "    return find(name, *rest)\n"
        "builtins.__import__ = interrupted; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_before_the_start_ends_with_status_130(windfall: Windfall, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(start, "train", interrupted)
    code, _, err = windfall("train", "small.toml")
    assert code == 130
    assert "Traceback" not in err


def test_more_tokens_than_the_models_context_are_refused(tmp_path: Path) -> None:
    recipe = parse_recipe({"rollout": {"max_tokens": 600}, "run": {"folder": str(tmp_path)}}, where="here")
    with pytest.raises(WindfallError, match="context of 512"):
        derived.derive(recipe, load.load("tiny", dtype="float32", device="cpu"), "cpu", "float32", [20])
