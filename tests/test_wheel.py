"""The wheel works without the repository: installed into an empty environment, it runs the demo and writes its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlparse

import pytest
from licenses import canonical, extras, required

ROOT = Path(__file__).parent.parent
SHORT = [
    "run.steps=2", "rollout.groups=4", "rollout.group_size=4", "rollout.max_tokens=24", "eval.tasks=4",
    "fleet.workers=1", "trace.nodes=0",
]  # fmt: skip


def call(*command: object, folder: Path, **more: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))} | more
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{' '.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_examples_writes_what_the_repository_has(windfall: Callable[..., tuple[int, str, str]], here: Path) -> None:
    code, out, _ = windfall("examples", "new")
    assert code == 0
    assert "recipes/demo.toml" in out
    for name in ("recipes", "examples"):
        there = {
            p.relative_to(ROOT)
            for p in (ROOT / name).rglob("*")
            if p.is_file() and "__pycache__" not in p.parts and "runs" not in p.parts
        }
        assert there == {p.relative_to("new") for p in Path("new", name).rglob("*.*")}
    code, _, err = windfall("examples", "new")
    assert (code, "this already exists" in err) == (2, True)


@pytest.mark.parametrize("name", ["demo.toml", "recipes/demo.toml"])
def test_missing_recipe_of_windfall_is_named(windfall: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, _, err = windfall("train", name)
    assert (code, "`windfall examples .`" in err, "Then give recipes/demo.toml." in err) == (2, True, True)


def test_lock_file_has_the_dependencies_of_the_project_and_public_addresses_only() -> None:
    lock = tomllib.loads((ROOT / "uv.lock").read_text())
    (own,) = (package for package in lock["package"] if package["name"] == "windfall")
    named = {entry["name"] for entry in own["metadata"]["requires-dist"]}
    expected = {canonical(name) for name in required()} | {name for names in extras().values() for name in names}
    assert named - {"windfall"} == expected, "make lock"
    hosts = {urlparse(address).hostname for address in re.findall(r'"(\w+://[^"]+)"', (ROOT / "uv.lock").read_text())}
    assert hosts == {"pypi.org", "files.pythonhosted.org"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--outdir", folder, ROOT, folder=folder)
    call(sys.executable, "-m", "twine", "check", "--strict", *folder.iterdir(), folder=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert all(name.startswith(("windfall/", "windfall-")) for name in names)
    for file in ("shipped/recipes/demo.toml", "models/base_models/tiny/model.safetensors", "page/static/page.js"):
        assert f"windfall/{file}" in names

    call(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    python, windfall = tmp_path / "venv" / "bin" / "python", tmp_path / "venv" / "bin" / "windfall"
    constraints = ("--constraint", ROOT / "constraints" / "cpu.txt")
    call(python, "-m", "pip", "install", "--quiet", *constraints, wheel, folder=tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    assert str(tmp_path) in call(python, "-c", "import windfall; print(windfall.__file__)", folder=work)

    sets = [word for value in SHORT for word in ("--set", value)]
    assert "finished" in call(windfall, "demo", *sets, folder=work)
    call(windfall, "page", "runs/demo", folder=work)
    assert "<html" in (work / "runs" / "demo" / "page.html").read_text()
    call(windfall, "examples", ".", folder=work)
    call(windfall, "train", "recipes/from-trl/recipe.toml", "--dry-run", folder=work)
    call(python, "-m", "pip", "install", "--no-index", "windfall[slurm]", folder=work)  # as errors say it
    call(windfall, "train", "recipes/solver-verifier.toml", "--dry-run", folder=work)


def indexes_of_pip() -> dict[str, str]:
    """Variables that give uv the package indexes that pip is set to; uv does not read pip's settings."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    )
    found = dict(re.findall(r"^\S+?\.([\w-]+)='(.*)'$", listed.stdout, re.MULTILINE))
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
    given = {name: found[key].replace("\\n", " ") for key, name in names.items() if key in found}
    return given | {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # the best version of all indexes, as pip chooses


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_uv_installs_the_wheel_and_runs_it_without_installing(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    call(tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "uv", folder=tmp_path)
    uv, uvx = tmp_path / "venv" / "bin" / "uv", tmp_path / "venv" / "bin" / "uvx"
    places = {name: str(tmp_path / name) for name in ("UV_TOOL_DIR", "UV_TOOL_BIN_DIR", "UV_CACHE_DIR")}
    given = {**indexes_of_pip(), **places, "UV_PYTHON_DOWNLOADS": "never"}
    same = ("--constraints", ROOT / "constraints" / "cpu.txt", "--python", sys.executable)
    call(uv, "tool", "install", *same, wheel, folder=tmp_path, **given)
    sets = [word for value in SHORT for word in ("--set", value)]
    assert "finished" in call(tmp_path / "UV_TOOL_BIN_DIR" / "windfall", "demo", *sets, folder=tmp_path)
    call(uvx, *same, "--from", wheel, "windfall", "token", "run.token", folder=tmp_path, **given)
    assert (tmp_path / "run.token").is_file()
