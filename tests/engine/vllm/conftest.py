"""These tests run where vLLM is installed: `make test-vllm`. Elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MISSING = importlib.util.find_spec("vllm") is None
collect_ignore_glob = ["test_vllm_*.py"] if MISSING else []


@pytest.fixture(scope="session", autouse=True)
def engines_closed() -> Iterator[None]:
    yield
    if not MISSING:
        import vllm_case

        vllm_case.close_all()


def pytest_report_header(config: Any) -> str:
    del config
    return "" if MISSING else f"vLLM tests: {Path(__file__).parent}"
