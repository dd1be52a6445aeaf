"""The Engine protocol: requests in, a stream of tokens out. It imports no torch, because the controller uses it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from windfall.types import Chunk, Request


class Engine(Protocol):
    """A generator of tokens. `tests/engine/test_contract.py` defines what every implementation must do.

    An engine may also have `capabilities` (types.Capabilities), `limit`, the longest sequence in tokens that fits,
    `counters`, and for sessions with several turns (engine/retention.py): `forget`, which drops what is kept for a
    session, and `take_dropped`, which returns the sessions whose kept pages were dropped since the last call.
    """

    version: int

    def add(self, request: Request) -> None: ...
    def cancel(self, id: str) -> None: ...
    def step(self) -> list[Chunk]: ...
    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None: ...
    def __len__(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    steps: int = 0  # model steps since the start
    rows: int = 0  # tokens computed since the start, in prefill and decode
    generated: int = 0  # tokens generated since the start
    reused_tokens: int = 0  # tokens found in the prefix cache since the start
    prefilled: int = 0  # tokens computed before a response could continue, since the start
    lookups: int = 0  # responses and turns admitted since the start
    hits: int = 0  # those of them that found tokens in the prefix cache
    kept_sessions: int = 0  # sessions that keep pages now, while their environment works
    kept_tokens: int = 0  # tokens in these pages
    preemptions: int = 0
    waiting: int = 0  # responses that are waiting for room now
