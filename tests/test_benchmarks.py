"""Benchmarks that the docs name keep running: those that need neither a GPU nor minutes, in a small form."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_controller_takes_in_every_token_of_the_intake_benchmark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = load("intake", monkeypatch)
    taken = asyncio.run(intake.in_process(tmp_path, workers=3, each=4, count=2, rounds=2, journaled=True))
    assert taken.tok_per_s > 0
