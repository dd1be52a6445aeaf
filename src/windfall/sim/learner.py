"""A simulated trainer, as the controller's loop asks for one: it waits in virtual time. Real tokens are what it counts.

One machine trains and, as the worker `local`, generates: never both at once, and a step or a piece of training that has
begun is ended first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from windfall.sim.book import Book
from windfall.sim.service import Service
from windfall.sim.worker import SimWorker
from windfall.train.base import Report
from windfall.train.checkpoint import State
from windfall.train.sample import Sample


class Learner:
    def __init__(self, service: Service, book: Book, *, save_s: float = 0.0) -> None:
        self._service, self._book, self._save_s = service, book, save_s
        self.local: Callable[[], SimWorker | None] = lambda: None
        """The worker on the same machine, if there is one."""
        self._tokens = self._responses = 0
        self.trained_tokens = 0
        """Real ones."""

    async def prepare(self, samples: Sequence[Sample]) -> list[Sample]:
        await self._work(self._service.training_s(sum(self._real(s) for s in samples)) / 3)  # a forward pass
        return list(samples)

    async def accumulate(self, samples: Sequence[Sample]) -> float:
        tokens = sum(self._real(s) for s in samples)
        self._tokens += sum(len(s.targets) for s in samples)
        self._responses += len(samples)
        self.trained_tokens += tokens
        took_s = self._service.training_s(tokens)
        await self._work(took_s)
        return took_s

    async def update(self, state: State | None) -> tuple[Report, State | None]:
        await self._work(self._service.update_s)
        report = Report(
            tokens=self._tokens, responses=self._responses, grad_norm=0.0, lr=0.0, entropy=0.0, engine_gap=0.0,
            engine_gap_max=0.0, clipped=0.0, kl=0.0, skipped=False,
        )  # fmt: skip
        self._tokens = self._responses = 0
        return report, state

    async def save(self) -> str:
        await self._work(self._save_s)
        return "nowhere"

    async def _work(self, seconds: float) -> None:
        if seconds <= 0:
            return
        local = self.local()
        if local is not None:
            await local.make_room()
        try:
            await asyncio.sleep(seconds)
        finally:
            if local is not None:
                local.training_over()

    def _real(self, sample: Sample) -> int:
        """By the response's first token, which says whose it is."""
        return self._book.length(sample.ids[sample.targets[0]])
