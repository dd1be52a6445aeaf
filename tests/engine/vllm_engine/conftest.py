"""These tests run where vLLM is installed: `make test-vllm`. Elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windfall.engine.vllm import installed

MISSING = installed.find() is None
collect_ignore_glob = ["test_vllm_*.py"] if MISSING else []


@pytest.fixture(scope="session", autouse=True)
def engines_closed() -> Iterator[None]:
    yield
    if not MISSING:
        from tests.support.engines import vllm_case

        vllm_case.close_all()
