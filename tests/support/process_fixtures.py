"""Fixtures for tests with real processes: which are alive, and which have ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import windfall
from tests.support import import_server
from windfall.processes import fork_client

ROOT = Path(__file__).parent.parent.parent
TOY = """
import os, sys

def main():
    exec(sys.argv[1], {"__name__": "toy"})
"""


def state(pid: int) -> str:
    """The state letter of a process, or "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return lambda pid: state(pid) not in ("", "Z")


@pytest.fixture
def gone() -> Callable[..., bool]:
    """Whether all of these processes end within 20 s."""

    def check(pids: Iterable[int], within_s: float = 20.0) -> bool:
        until = time.monotonic() + within_s
        left = list(pids)
        assert left, "nothing was started"
        while left := [pid for pid in left if state(pid) not in ("", "Z")]:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    return check


@pytest.fixture
def read_when() -> Callable[..., str]:
    """Waits up to 60 s until a file contains a word, and returns the text of the file."""

    def read(path: Path, word: str = "\n") -> str:
        until = time.monotonic() + 240.0
        while time.monotonic() < until:
            if path.exists() and word in (text := path.read_text()):
                return text
            time.sleep(0.01)
        raise AssertionError(f"waited 60 s for {word!r} in {path}: {path.read_text() if path.exists() else 'no file'}")

    return read


@pytest.fixture
def toy_env(tmp_path: Path) -> dict[str, str]:
    """Environment variables with which `toy:main` runs the Python code in its first argument. They select the windfall
    under test, which may differ from the installed one."""
    (tmp_path / "toy.py").write_text(TOY)
    source = Path(windfall.__file__).parent.parent
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{source}"}


@pytest.fixture
def toy_import_server(tmp_path: Path, toy_env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """An import server that has imported the module `toy`. From now on `toy_env` names it."""
    path = tmp_path / "imports"
    with (tmp_path / "import_server.log").open("wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.import_server", str(path), "toy"],
            env=toy_env, cwd=ROOT, stdout=log, stderr=log,
        )  # fmt: skip
    toy_env[fork_client.RUNNER] = import_server.runner(str(path))
    try:
        until = time.monotonic() + 240.0
        while not path.exists():
            assert server.poll() is None, (tmp_path / "import_server.log").read_text()
            assert time.monotonic() < until, "waited 60 s for the socket of the import server"
            time.sleep(0.01)
        yield server
    finally:
        server.kill()
        server.wait()
