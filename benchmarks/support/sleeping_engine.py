"""An engine that sleeps instead of computing. It implements the Engine interface, so everything around it is windfall's
own: worker, link, ledger, policies.

A new request costs a prefill of its prompt. Siblings share one prefill, as they would share KV pages. After a weight
swap, every running request is prefilled again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from windfall.engine.base import Engine
from windfall.sim.core.draws import LogNormalLengths
from windfall.step_time import StepTime
from windfall.types import Chunk, Finish, Request


@dataclass(slots=True)
class _Row:
    request: Request
    length: int
    """Tokens of the whole response."""
    generated: int = 0

    @property
    def position(self) -> int:
        return self.request.position + self.generated


class SleepingEngine(Engine):
    def __init__(
        self, service: StepTime, lengths: LogNormalLengths, *, vocabulary: int,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        self.version = 0
        self._service, self._lengths, self._vocabulary, self._sleep = service, lengths, vocabulary, sleep
        self._rows: dict[str, _Row] = {}
        self._prefill = 0
        self._prompts: set[tuple[int, ...]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: Request) -> None:
        assert request.id not in self._rows, f"{request.id} is already running"
        if request.prompt not in self._prompts:
            self._prompts.add(request.prompt)
            self._prefill += len(request.prompt)
        prompt = request.prompt[: len(request.prompt) - request.position]  # without tokens generated elsewhere
        self._rows[request.id] = _Row(request, self._lengths.draw(request.seed, hash(prompt)))

    def cancel(self, id: str) -> None:
        self._rows.pop(id, None)

    def step(self) -> list[Chunk]:
        context = 0
        if self._service.context_s:
            context = sum(len(row.request.prompt) + row.generated for row in self._rows.values())
        self._sleep(self._service.step_s(len(self._rows), context) + self._service.prefill_s * self._prefill)
        self._prefill = 0
        return [self._next(id, row) for id, row in list(self._rows.items())]

    def _next(self, id: str, row: _Row) -> Chunk:
        r, position = row.request, row.position
        row.generated += 1
        last = position + 1 >= row.length and bool(r.stop)
        next_token = min(r.stop) if last else token(r.seed, position, self._vocabulary, r.stop)
        finish: Finish | None = "stop" if last else "length" if row.generated == r.max_tokens else None
        if finish:
            del self._rows[id]
        return Chunk(
            id=id, position=position, tokens=(next_token,), logprobs=(-1.0,), version=self.version, finish=finish
        )  # fmt: skip

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        del weights, policy
        self.version = version
        self._prompts.clear()
        self._prefill = sum(len(row.request.prompt) + row.generated for row in self._rows.values())


def token(seed: int, position: int, vocabulary: int, stop: frozenset[int]) -> int:
    """The token at this position of a response: arbitrary, but reproducible, and never a stop token."""
    digest = xxhash.xxh3_64_intdigest(f"{seed}:{position}".encode())
    while (chosen := digest % vocabulary) in stop:
        digest += 1
    return chosen
