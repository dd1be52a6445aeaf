"""`windfall ranks`: what it leaves behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from windfall.processes.process import EXIT_NO_CONTROLLER
from windfall.trainer.ranks import rank_host


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_temporary_folder_is_removed(temporary: Path) -> None:
    code = rank_host.main(
        "http://127.0.0.1:9", "t" * 20, host="", folder=None, ca=None, overrides=(), patience_s=0.1
    )  # fmt: skip
    assert code == EXIT_NO_CONTROLLER
    assert list(temporary.iterdir()) == []


def test_temporary_folder_with_the_log_of_a_failure_stays(temporary: Path) -> None:
    with rank_host.temporary_folder() as folder:
        (folder / ".trainer.failure").write_text("{}")
    assert list(temporary.iterdir()) == [folder]
