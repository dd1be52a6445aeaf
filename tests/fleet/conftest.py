"""Real processes for the tests of the fleet, and a look at what is left of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

import windfall

TOY = """
import os, sys

def main():
    exec(sys.argv[1], {"__name__": "toy"})
"""


def state(pid: int) -> str:
    """The letter of a process's state, and nothing when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def alive() -> Callable[[int], bool]:
    return lambda pid: state(pid) not in ("", "Z")


@pytest.fixture
def gone() -> Callable[..., bool]:
    """Do all of these end within 2 s?"""

    def look(pids: Iterable[int], within_s: float = 2.0) -> bool:
        until = time.monotonic() + within_s
        left = list(pids)
        assert left, "nothing was started"
        while left := [pid for pid in left if state(pid) not in ("", "Z")]:
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    return look


@pytest.fixture
def read_when() -> Callable[..., str]:
    """The text of a file as soon as a word is in it. Waits up to 10 s."""

    def read(path: Path, word: str = "\n") -> str:
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            if path.exists() and word in (text := path.read_text()):
                return text
            time.sleep(0.01)
        raise AssertionError(f"waited 10 s for {word!r} in {path}: {path.read_text() if path.exists() else 'no file'}")

    return read


@pytest.fixture
def toy_env(tmp_path: Path) -> dict[str, str]:
    """An environment in which `toy:main` runs the Python code that is its first argument, with the windfall under
    test, which need not be the installed one."""
    (tmp_path / "toy.py").write_text(TOY)
    source = Path(windfall.__file__).parent.parent
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{source}"}
