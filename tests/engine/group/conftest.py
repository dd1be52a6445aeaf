"""One engine group for all tests of a file, and the weights that it loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.continuation import versions
from tests.support.engine_groups import Case, opened


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from opened(tmp_path_factory.mktemp("group"))


@pytest.fixture
def case_without_free_memory(tmp_path: Path) -> Iterator[Case]:
    """A group whose children return free memory to the system at once."""
    with pytest.MonkeyPatch.context() as patch:
        # torch's allocator on aarch64 would keep free memory for later, and nothing could be measured.
        patch.setenv("MIMALLOC_PURGE_DELAY", "0")
        yield from opened(tmp_path)


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return versions("llama", 3)
