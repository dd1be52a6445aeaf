"""One set of child processes for all of these tests: reasoning-gym takes seconds to import."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from windfall.envs import apart


@pytest.fixture(scope="session", autouse=True)
def children() -> Iterator[None]:
    yield
    apart.MAKING.close()
    apart.SCORING.close()
