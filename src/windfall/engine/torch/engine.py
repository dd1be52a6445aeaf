"""The engine for any decoder on any device: one forward pass of transformers' module per step, with prefill and decode
in one batch, and at most one new token for every running response."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windfall.engine.paged import PagedEngine
from windfall.engine.pages import Pages
from windfall.engine.scheduler import ScheduledRows, Scheduler
from windfall.types import Capabilities, Chunk

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV


class TorchEngine(PagedEngine):
    capabilities = Capabilities(name="torch")

    def __init__(
        self,
        model: Any,
        *,
        kv_tokens: int,
        page_size: int = 16,
        max_running: int = 256,
        max_rows: int = 2048,
        deterministic: bool = False,
        version: int = 0,
        kv: TenantKV | None = None,
    ) -> None:
        """`kv`: pages in memory that another engine shares; then `kv_tokens` and `page_size` do not count."""
        from windfall.engine.torch.runner import Runner  # imports transformers, which GraphEngine does not use

        pages = Pages(-(-kv_tokens // page_size), page_size) if kv is None else kv.pages
        count = pages.capacity
        slots = min(max_running, max_rows)
        scheduler = Scheduler(pages, slots=slots, max_rows=max_rows, one_batch=True)
        # The newest token needs no page yet, but the next one would.
        super().__init__(model, scheduler, version=version, limit=count * pages.size - 1, kv=kv)
        self._runner = Runner(model, pages=count, page_size=pages.size, deterministic=deterministic, kv=kv)

    def step(self, most_rows: int | None = None, most_steps: int | None = None, prefill: bool = True) -> list[Chunk]:
        del most_steps  # every launch is one step, which is waited for
        work = None if most_rows == 0 else self._scheduler.next(most_rows=most_rows, may_prefill=prefill)
        if work is None:
            self.last_step = (0, 0, False)
            return []
        self.last_step = work.shape
        decode = [ScheduledRows(s, len(s.tokens) - 1, len(s.tokens), True) for s in work.rows]
        rows = [*decode, *work.prefill]
        self._runner.allocate()
        new = self._runner.run(rows)
        self._counters.steps += 1
        self._counters.rows += work.shape[0]
        self._counters.prefilled += work.shape[0] - len(decode)
        sampling = [r.sequence for r in rows if r.samples]
        return [self._append(s, [t], [lp], self.version) for s, (t, lp) in zip(sampling, new, strict=True)]

    @property
    def asleep(self) -> bool:
        return self._runner.pools is None

    def _free_memory(self) -> None:
        self._runner.free()
