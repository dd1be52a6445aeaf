"""Fixtures for tests that run the command line, and the order of the test files."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis
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

hypothesis.settings.register_profile("windfall", deadline=None)  # a busy machine is not a fault
hypothesis.settings.load_profile("windfall")

HERE = Path(__file__).parent
LONGEST_FIRST = (
    "train/test_checkpoint.py", "worker/engine_group", "train/test_ranks.py", "launch", "sim/chaos", "test_runs.py",
    "test_adapters.py", "engine/test_contract.py", "selftest", "envs/test_hostile_runs.py",
    "engine/cuda/test_engine.py", "train", "fleet", "envs/process_pool", "sim",
)  # fmt: skip
"""Files and folders that take the most time. With `--dist loadfile`, one worker would run the last of them alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {HERE / name: n for n, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        found = (rank[path] for path in (item.path, *item.path.parents) if path in rank)
        return next(found, len(rank))

    items.sort(key=place)


@pytest.fixture(scope="session")
def small_recipe() -> str:
    """A run of two steps that takes a second."""
    return SMALL


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
