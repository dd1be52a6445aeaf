"""What remains of a run whose start fails. No processes."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe, RunSection
from windfall.run import start


def test_folder_of_a_failed_start_is_kept_with_its_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(run=RunSection(folder=tmp_path / "runs"))
    folder, error = start.new_folder(recipe), WindfallError("no such thing", where="model.path", fix="Name another.")

    def run(*_: object) -> None:
        raise error

    monkeypatch.setattr(start, "_run", run)
    with pytest.raises(WindfallError) as caught:
        start.train(recipe, folder)
    assert caught.value is error
    assert (folder / "recipe.toml").is_file()
    assert start.new_folder(recipe).name == "run-2"


def test_run_whose_name_is_taken_says_how_the_older_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run(recipe: Recipe, folder: Path, _: object) -> None:
        with contextlib.closing(EventLog(folder / "events.jsonl")) as events:
            events.instant("end", step=5, finished=folder.name.endswith("-2"))

    monkeypatch.setattr(start, "_run", run)
    recipe = Recipe(run=RunSection(name="small", folder=tmp_path))
    for name, state in (
        ("small", ""),
        ("small-2", f"{tmp_path}/small exists (stopped after step 5); `windfall resume {tmp_path}/small` continues it"),
        ("small-3", f"{tmp_path}/small-2 exists (finished after step 5). This is a new run: "),
    ):
        start.train(recipe, start.new_folder(recipe))
        shown = capfd.readouterr().out
        assert state in shown
        assert (f". This is a new run: {tmp_path}/{name}\n" in shown) == bool(state)
    start.new_folder(recipe)
    with folders.owned(tmp_path / "small-4"):
        start.train(recipe, start.new_folder(recipe))
    start.new_folder(recipe)
    start.train(recipe, start.new_folder(recipe))
    shown = capfd.readouterr().out
    assert f"{tmp_path}/small-4 exists (running). This is a new run: {tmp_path}/small-5" in shown
    assert f"{tmp_path}/small-6 exists (no step done); `windfall resume {tmp_path}/small-6` continues it." in shown


def test_folder_that_cannot_be_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "replace", full)
    with pytest.raises(WindfallError, match="cannot write the recipe: No space left on device"):
        start.new_folder(Recipe(run=RunSection(folder=tmp_path / "runs")))
    assert list((tmp_path / "runs").iterdir()) == []


def test_run_uses_the_given_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(run=RunSection(folder=tmp_path / "runs"))
    folder = start.new_folder(recipe)
    monkeypatch.setattr(start, "_run", lambda *_: None)
    start.train(recipe, folder, token="chosen-before-the-run")
    assert (folder / "token").read_text() == "chosen-before-the-run"
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
