"""An engine that sleeps instead of computing. It keeps to the Engine seam, so everything around it is the product:
worker, link, ledger, policies.

A new request costs a prefill of its prompt; siblings share one, as pages would be shared. Swapping weights costs what
is running a prefill each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windfall.sim.core.service import Lengths, Service, token
from windfall.types import Chunk, Finish, Request


@dataclass(slots=True)
class _Row:
    request: Request
    length: int
    """Of the whole response."""
    made: int = 0

    @property
    def position(self) -> int:
        return self.request.position + self.made


class SleepingEngine:
    def __init__(
        self, service: Service, lengths: Lengths, *, vocabulary: int, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self.version = 0
        self._service, self._lengths, self._vocabulary, self._sleep = service, lengths, vocabulary, sleep
        self._rows: dict[str, _Row] = {}
        self._prefill = 0
        self._prompts: set[tuple[int, ...]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: Request) -> None:
        assert request.id not in self._rows, f"{request.id} is running"
        if request.prompt not in self._prompts:
            self._prompts.add(request.prompt)
            self._prefill += len(request.prompt)
        asked = request.prompt[: len(request.prompt) - request.position]  # without what was made elsewhere
        self._rows[request.id] = _Row(request, self._lengths.of(request.seed, hash(asked)))

    def cancel(self, id: str) -> None:
        self._rows.pop(id, None)

    def step(self) -> list[Chunk]:
        context = 0
        if self._service.context_s:
            context = sum(len(row.request.prompt) + row.made for row in self._rows.values())
        self._sleep(self._service.step_s(len(self._rows), self._prefill, context))
        self._prefill = 0
        return [self._next(id, row) for id, row in list(self._rows.items())]

    def _next(self, id: str, row: _Row) -> Chunk:
        r, position = row.request, row.position
        row.made += 1
        last = position + 1 >= row.length and bool(r.stop)
        made = min(r.stop) if last else token(r.seed, position, self._vocabulary, r.stop)
        finish: Finish | None = "stop" if last else "length" if row.made == r.max_tokens else None
        if finish:
            del self._rows[id]
        return Chunk(id=id, position=position, tokens=(made,), logprobs=(-1.0,), version=self.version, finish=finish)

    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        del weights
        self.version = version
        self._prompts.clear()
        self._prefill = sum(len(row.request.prompt) + row.made for row in self._rows.values())
