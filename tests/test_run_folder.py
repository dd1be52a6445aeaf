"""Locks, logs and recorded errors in a run's folder."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.recipe.file import load_recipe
from windfall.recipe.sections import Recipe, RunSection
from windfall.run import start


def test_run_never_writes_into_the_folder_of_another(tmp_path: Path) -> None:
    run = RunSection(name="small", folder=tmp_path / "runs")
    created = [start.new_folder(Recipe(run=run)) for _ in range(3)]
    assert [path.name for path in created] == ["small", "small-2", "small-3"]
    assert all(load_recipe(path / "recipe.toml").run.name == "small" for path in created)


@pytest.mark.parametrize("typed", ["small", "runs/smal"])
def test_missing_run_is_looked_for_among_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.chdir(tmp_path)
    start.new_folder(Recipe(run=RunSection(name="small")))
    Path("src").mkdir()
    with pytest.raises(WindfallError) as refused:
        folders.check_exists(Path(typed))
    assert refused.value.fix == "Did you mean 'runs/small'?"


def test_run_is_named_by_its_folder_or_by_its_name_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start.new_folder(Recipe(run=RunSection(name="small")))
    assert folders.named(Path("small")) == folders.named(Path("runs/small")) == Path("runs/small")
    assert folders.named(Path("smal")) == Path("smal")
    Path("small").mkdir()
    assert folders.named(Path("small")) == Path("small")


def test_checking_a_lock_does_not_take_it(tmp_path: Path) -> None:
    assert not folders.held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with folders.owned(tmp_path):
        assert folders.held(tmp_path)
        assert not folders.held(tmp_path, "trainer")
    assert not folders.held(tmp_path)
    with (tmp_path / ".run.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # another process checks the lock: it does not run the run
        assert not folders.held(tmp_path)


def test_lock_can_be_taken_while_another_process_checks_it(tmp_path: Path) -> None:
    (tmp_path / ".run.lock").touch()
    checking = (tmp_path / ".run.lock").open("rb")
    fcntl.flock(checking, fcntl.LOCK_SH)
    threading.Timer(0.1, checking.close).start()
    with folders.owned(tmp_path):
        pass


def test_second_owner_is_refused_quickly(tmp_path: Path) -> None:
    began = time.monotonic()
    with folders.owned(tmp_path), pytest.raises(WindfallError, match="another process"), folders.owned(tmp_path):
        pass
    assert time.monotonic() - began < 10.0


def test_newest_logs_are_kept(tmp_path: Path) -> None:
    for n in range(60):
        (tmp_path / f"w{n}.log").touch()
        os.utime(tmp_path / f"w{n}.log", (n, n))
    folders.keep_newest(tmp_path, 50, spare={"w0.log", "w5.log"})
    assert {int(p.stem[1:]) for p in tmp_path.iterdir()} == {0, 5, *range(10, 60)}
    folders.keep_newest(tmp_path, 50, spare=set())
    assert {int(p.stem[1:]) for p in tmp_path.iterdir()} == set(range(10, 60))


def test_first_error_of_several_processes_is_kept(tmp_path: Path) -> None:
    for n in range(3):
        folders.fail(tmp_path, "trainer", WindfallError(f"rank {n} failed", where="here", fix=""), first=True)
    assert folders.failure(tmp_path, "trainer", 1).what == "rank 0 failed"
    assert [p.name for p in tmp_path.iterdir()] == [".trainer.failure"]
    folders.fail(tmp_path, "trainer", WindfallError("last", where="here", fix=""))
    assert folders.failure(tmp_path, "trainer", 1).what == "last"
    assert folders.failure(tmp_path, "worker", -6, "w1").what == "the w1 was killed (SIGABRT)"


def test_error_that_cannot_be_recorded_goes_to_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "replace", full)
    folders.fail(tmp_path, "controller", WindfallError("it broke", where="here", fix="Mend it."))
    assert capsys.readouterr().err == "error: here: it broke\nMend it.\n"
