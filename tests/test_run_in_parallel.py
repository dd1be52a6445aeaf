"""Tests in several processes are reported as if one had run them, and a process that dies fails one test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUNNER = Path(__file__).with_name("run_in_parallel.py")
FIRST = """
import os, signal, warnings

def test_passes(tmp_path):
    print("unseen")
    warnings.warn("look here")

def test_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_comes_after():
    pass
"""
SECOND = """
import pytest

@pytest.fixture(scope="module")
def opened():
    yield 1
    assert False, "while it is closed"

def test_fails(opened):
    print("shown")
    assert opened == 2

@pytest.mark.parametrize("n", range(5))
def test_numbers(opened, n):
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    (folder / "test_first.py").write_text(FIRST)
    (folder / "test_second.py").write_text(SECOND)
    command = [sys.executable, RUNNER, "2", "-q", "-p", "no:cacheprovider", "--rootdir", folder, folder, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    return done.returncode, done.stdout + done.stderr


def test_results_of_all_processes_are_reported(tmp_path: Path) -> None:
    status, output = run(tmp_path)
    assert status == 1
    assert "2 failed, 7 passed, 1 warning, 1 error" in output
    assert "the process of this test ended with SIGKILL" in output
    for text, is_there in (("shown", True), ("unseen", False), ("look here", True), ("while it is closed", True)):
        assert (text in output) == is_there, text


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    status, output = run(tmp_path, "-x")
    assert status == 1
    assert "stopping after 1 failures" in output
