"""Fixtures for tests that run the command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from windfall import cli

SMALL = """
[run]
name = "small"
steps = 2
device = "cpu"
threads = 1
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 4
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a recipe in it and nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path


@pytest.fixture
def windfall(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process through the real entry point; returns exit status, output and errors."""

    def command(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["windfall", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return (int(end.value.code or 0), *capsys.readouterr())

    return command
