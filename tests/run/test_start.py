"""What remains of a run whose start fails. No processes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.recipe.sections import Recipe, RunSection
from windfall.run import start


def failing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: WindfallError, steps: int = 0, workers: int = 0
) -> Path:
    """The folder of a run that ended with this error, after `steps` steps and with `workers` workers."""
    recipe = Recipe(run=RunSection(folder=tmp_path / "runs"))
    folder = start.new_folder(recipe)

    def run(*_: object) -> None:
        log = EventLog(folder / "events.jsonl")
        for worker in range(workers):
            log.instant("worker_joined", worker=f"w{worker}")
        for step in range(1, steps + 1):
            log.scalar("step", step=step)
        log.close()
        raise error

    monkeypatch.setattr(start, "_run", run)
    with pytest.raises(WindfallError) as caught:
        start.train(recipe, folder)
    assert caught.value is error
    return folder


def test_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(tmp_path, monkeypatch, WindfallError("no such thing", where="model.path", fix="Name another."))
    assert list(tmp_path.iterdir()) == []


def test_failed_start_keeps_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = start.new_folder(Recipe(run=RunSection(folder=tmp_path / "runs")))
    folder = failing(tmp_path, monkeypatch, WindfallError("no such thing"))
    assert folder.name == "run-2"
    assert [p.name for p in other.parent.iterdir()] == ["run"]


@pytest.mark.parametrize("fix", ["See trainer.log in the run's folder.", "Make room; then `windfall resume` it."])
def test_folder_that_the_error_refers_to_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fix: str) -> None:
    assert failing(tmp_path, monkeypatch, WindfallError("it broke", fix=fix)).is_dir()


def test_run_with_a_completed_step_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing(tmp_path, monkeypatch, WindfallError("it broke"), steps=1).is_dir()


def test_run_that_had_a_worker_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = WindfallError("3 workers in a row were lost with it", where="response 1/0")
    assert failing(tmp_path, monkeypatch, error, workers=1).is_dir()


def test_folder_that_cannot_be_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "replace", full)
    with pytest.raises(WindfallError, match="cannot write the recipe: No space left on device"):
        start.new_folder(Recipe(run=RunSection(folder=tmp_path / "runs")))
    assert list(tmp_path.iterdir()) == []


def test_run_uses_the_given_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(run=RunSection(folder=tmp_path / "runs"))
    folder = start.new_folder(recipe)
    monkeypatch.setattr(start, "_run", lambda *_: None)
    start.train(recipe, folder, token="chosen-before-the-run")
    assert (folder / "token").read_text() == "chosen-before-the-run"
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
