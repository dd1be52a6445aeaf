"""The Engine seam: requests in, a stream of tokens out. Imports no torch: the controller needs only this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from windfall.types import Chunk, Request


class Engine(Protocol):
    """The seam: whatever makes tokens. `tests/engine/test_contract.py` says what every implementation must do."""

    version: int

    def add(self, request: Request) -> None: ...
    def cancel(self, id: str) -> None: ...
    def step(self) -> list[Chunk]: ...
    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    steps: int = 0
    rows: int = 0
    made: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    waiting: int = 0
    """Responses that have no room: steps are made without them."""
