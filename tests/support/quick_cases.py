"""Cases of a test, of which `make test` tries a few and `make slow` all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_cases(every: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """Arguments of `parametrize`: every case, and all but the `quick` ones are slow."""
    every = list(every)
    assert {*quick} <= {*every}
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in every]
