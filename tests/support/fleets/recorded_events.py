"""The events of a provider under test."""

from __future__ import annotations

import asyncio
import time
from typing import Any


class RecordedEvents:
    """All events of a provider, in order."""

    def __init__(self, limit_s: float = 60.0) -> None:
        """`limit_s`: seconds that `until` waits."""
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._limit_s = limit_s

    def __call__(self, name: str, /, **fields: Any) -> None:
        self.all.append((name, fields))

    def of(self, *names: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.all if name in names]

    async def until(self, count: int, *names: str) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + self._limit_s
        while len(self.of(*names)) < count:
            assert time.monotonic() < deadline_s, f"waited {self._limit_s:g} s for {count} of {names}: {self.all}"
            await asyncio.sleep(0.01)
        return self.of(*names)
