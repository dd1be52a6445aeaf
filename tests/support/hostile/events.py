"""Events with values that windfall does not write: of other types, not finite, too large, or missing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

HOSTILE_VALUES: list[Any] = [
    None, "x", "", "NaN", -1, 1e308, float("nan"), float("inf"), 10**30, 2**63, True, [], {}, [1], [None], [[1, 2]],
    [["a", "b", "c", "d"]], {"w": 5}, {"w": [[1]]}, "\ud800", "[bold",
]  # fmt: skip


def damaged(event: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The event with each hostile value in place of each of its values, also of those inside, and without each."""
    for path in _paths(event):
        for value in (*HOSTILE_VALUES, ...):
            changed = copy.deepcopy(event)
            inside: Any = changed
            for key in path[:-1]:
                inside = inside[key]
            if value is ...:
                del inside[path[-1]]
            else:
                inside[path[-1]] = value
            yield changed


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys = value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
    for key in keys:
        yield from _paths(value[key], (*path, key))
