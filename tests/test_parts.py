"""The program works without each of the parts beside it: every test deletes one of their folders in a copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from windfall import parts

ROOT = Path(__file__).parent.parent
CORE = ("recipe.file", "controller.process", "run.supervisor", "run.worker_sources", "run.views.top")
NEEDED_BY = {"sim": ("plan",), "providers.ray": ("on_ray",)}
RECIPES = {
    "sim": "[sim]\nsigma = 0.5", "plan": "[plan]\nname = 'x'", "providers.ray": "[fleet.ray]",
    "providers.kubernetes": "[fleet.kubernetes]", "providers.skypilot": "[fleet.skypilot]",
    "providers.slurm": "[fleet.slurm]", "sft": "[sft]\nbatch = 4",
}  # fmt: skip
"""For each part with a section, a recipe that has it."""
SHORT = [
    "run.steps=2", "rollout.groups=4", "rollout.group_size=4", "rollout.max_tokens=24", "eval.tasks=4",
    "fleet.workers=1", "trace.nodes=0",
]  # fmt: skip


class Copy:
    """A copy of the source without one part."""

    def __init__(self, folder: Path, without: str) -> None:
        self.folder, self.without = folder, without
        shutil.copytree(ROOT / "src", folder / "src")
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        shutil.rmtree(folder / "src" / "windfall" / without.replace(".", "/"))

    def python(self, *arguments: str, status: int = 0) -> str:
        env = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    def windfall(self, *arguments: str, status: int = 0) -> str:
        return self.python("-m", "windfall.run.cli", *arguments, status=status)


@pytest.fixture(params=parts.OWN)
def copy(tmp_path: Path, request: pytest.FixtureRequest) -> Copy:
    return Copy(tmp_path, request.param)


def test_program_starts_without_a_part(copy: Copy) -> None:
    """One process, because each takes seconds to import the program."""
    lost = [copy.without, *NEEDED_BY.get(copy.without, ())]
    code = f"""
import sys
from pathlib import Path
from typer.testing import CliRunner
from windfall import parts
from windfall.errors import WindfallError
{"".join(f"import windfall.{module}; " for module in CORE)}
from windfall.run import cli
from windfall.recipe.file import load_recipe, parse_recipe
lost = {lost}
assert Path(parts.__file__).is_relative_to({str(copy.folder)!r})
assert [part.name for part in parts.found()] == [name for name in parts.OWN if name not in lost]
shown = CliRunner().invoke(cli.app, ["--help"])
assert shown.exit_code == 0 and "train" in shown.output and "top" in shown.output
done = CliRunner().invoke(cli.app, ["train", "--dry-run", "recipes/demo.toml"])
assert done.exit_code == 0, done.output
for name in lost:
    if name in {list(RECIPES)}:
        Path("r.toml").write_text({RECIPES}[name])
        try:
            load_recipe(Path("r.toml"))
            refused = ""
        except WindfallError as e:
            refused = str(e)
        assert "restore" in refused, refused
    if "." not in name:
        assert "restore" in str(CliRunner().invoke(cli.app, [name]).exception)
"""
    copy.python("-c", code)


@pytest.mark.slow
def test_demo_and_tests_of_the_core_without_a_part(copy: Copy) -> None:
    sets = [word for value in SHORT for word in ("--set", value)]
    assert "finished" in copy.windfall("train", "recipes/demo.toml", *sets)
    for name in ("tests", "pyproject.toml", "docs"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy.folder / name)
    core = ["tests/recipe/test_config.py", "tests/controller/test_loop.py", "tests/run/test_liveness.py"]
    copy.python("-m", "pytest", "-q", "-p", "no:cacheprovider", *core)


def test_part_of_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        def load(self) -> parts.ProgramPart:
            made = parts.ProgramPart()
            made.name = "theirs"
            return made

    monkeypatch.setattr(parts.importlib.metadata, "entry_points", lambda group: [Entry()])
    parts._installed.cache_clear()
    try:
        assert parts.found()[-1].name == "theirs"
    finally:
        parts._installed.cache_clear()
