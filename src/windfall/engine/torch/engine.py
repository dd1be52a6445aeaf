"""The engine for any decoder on any device: one forward pass of transformers' module per step, with prefill and decode
in one batch, and one new token for every running response, or several if tokens were drafted (engine/drafts.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from windfall.engine.draft_length import WIDTHS, DraftLength
from windfall.engine.drafts import Drafts, verify
from windfall.engine.paged import PagedEngine
from windfall.engine.pages import Pages
from windfall.engine.scheduler import Launch, ScheduledRows, Scheduler, widest
from windfall.engine.scheduler import Sequence as SequenceState
from windfall.engine.torch.watch import Watch
from windfall.types import Capabilities, Chunk
from windfall.weights.merged import MergedWeights

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV
    from windfall.engine.torch.runner import Sampled


LEARN_EVERY = 8
"""Steps after which new runs of right guesses are taken into account."""


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
        speculation: bool = False,
        adapters: int = 0,
        adapter_rank: int = 0,
        experts: bool = False,
    ) -> None:
        """`kv`: pages in memory that another engine shares; then `kv_tokens` and `page_size` do not count.
        `speculation`: draft tokens from the texts of siblings where that is faster. Up to rounding, which is that of
        another batch, and bit for bit in deterministic mode, the tokens are the same. `adapters`, `adapter_rank`,
        `experts`: as in EngineSpec; a model without experts returns none."""
        from windfall.engine.torch.runner import Runner  # imports transformers, which GraphEngine does not use

        pages = Pages(-(-kv_tokens // page_size), page_size) if kv is None else kv.pages
        count = pages.capacity
        slots = min(max_running, max_rows)
        scheduler = Scheduler(pages, slots=slots, max_rows=max_rows, one_batch=True)
        # The newest token needs no page yet, but the next one would.
        super().__init__(model, scheduler, version=version, limit=count * pages.size - 1, kv=kv)
        how: dict[str, Any] = {"deterministic": deterministic, "kv": kv, "adapters": adapters > 0, "experts": experts}
        self._runner = Runner(model, pages=count, page_size=pages.size, **how)
        if self._runner.adapters is not None:
            self._hold_adapters(self._runner.adapters, adapters, adapter_rank)
        # An engine that lends its device keeps its steps short.
        self._drafts = Drafts() if speculation and kv is None else None
        self._draft_length = DraftLength(WIDTHS)
        self._watch = Watch()
        self.capabilities = replace(
            self.capabilities, drafts=self._drafts is not None, experts=self._runner.experts is not None
        )

    def step(self, most_rows: int | None = None, most_steps: int | None = None, prefill: bool = True) -> list[Chunk]:
        del most_steps  # every launch is one step, which is waited for
        work = None
        if most_rows != 0:
            work = self._scheduler.next(most_rows=most_rows, may_prefill=prefill, width=self._choose_width())
        if work is None:
            self.last_step = (0, 0, False)
            return []
        self.last_step = work.shape
        began_s = time.monotonic()
        expected = self._expected(work)
        searched_s = time.monotonic() - began_s
        rows = [*(_decode_rows(s, expected.get(s) or [], work.width) for s in work.rows), *work.prefill]
        self._runner.allocate()
        new = self._runner.run(rows)
        sampling = [r.sequence for r in rows if r.samples]
        chunks = [self._accept(s, expected.get(s), drawn) for s, drawn in zip(sampling, new, strict=True)]
        self._scheduler.collected(work, np.array([len(c.tokens) for c in chunks[: len(work.rows)]], np.int64))
        self._counters.steps += 1
        self._counters.rows += sum(r.stop - r.start for r in rows)
        self._counters.prefilled += sum(r.stop - r.start for r in work.prefill)
        if self._drafts is not None:
            self._learn(work, chunks, time.monotonic() - began_s, searched_s)
        return chunks

    def swap(self, version: int, weights: Mapping[str, Tensor] | None = None, *, policy: str = "") -> None:
        keeps_base = isinstance(weights, MergedWeights) and weights.base_is_loaded
        if not (self.capabilities.adapters and keeps_base):
            self._runner.forget_weights()
        super().swap(version, weights, policy=policy)

    def cancel(self, id: str) -> None:
        super().cancel(id)
        self._end_text(id)

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        if self._drafts is not None:
            self._drafts.remember(group, id, position, tokens)

    def _end_text(self, id: str) -> None:
        if self._drafts is not None:
            self._drafts.end(id)
            self._watch.end(id)

    def _choose_width(self) -> int:
        if self._drafts is None:
            return 1
        scheduler, decoding = self._scheduler, self._scheduler.decoding
        most, measured = widest(scheduler.max_rows, decoding), not scheduler.can_prefill
        return self._draft_length.choose(_batch(decoding), most, measured=measured)

    def _expected(self, work: Launch) -> dict[SequenceState, list[int]]:
        """What the rows of a response are expected to sample, as far as that is known and may be generated. Without
        drafts, only for responses that are followed."""
        drafts, watched = self._drafts, self._watch.ids
        if drafts is None or (work.width == 1 and not watched and not drafts.following):
            return {}
        followed = work.rows
        if work.width == 1:
            ids = drafts.following | watched.keys()
            followed = [s for s in work.rows if s.request.id in ids]
        out: dict[SequenceState, list[int]] = {}
        for s in followed:
            id, most = s.request.id, min(work.width, s.request.max_tokens - s.generated)
            expected = drafts.expected(id, most, search=work.width > 1 or id in watched)
            if expected is not None:
                out[s] = expected
        return out

    def _accept(self, s: SequenceState, expected: list[int] | None, drawn: list[Sampled]) -> Chunk:
        """Append the tokens that count. `expected`: None if the response was not followed."""
        request, first = s.request, s.generated == 0
        tokens = [token for token, _ in drawn]
        count, right = verify(tokens, expected or (), request.max_tokens - s.generated, request.stop)
        chosen: dict[str, Any] = {}
        if self._runner.experts is not None:  # before the response may lose its pages
            span = range(s.experts_sent, len(s.tokens) + count - 1)
            chosen = {"experts": self._runner.experts.of_tokens(s.pages, span), "expert_tokens": len(span)}
            s.experts_sent = span.stop
        chunk = self._append(s, tokens[:count], [logprob for _, logprob in drawn[:count]], self.versions)
        chunk = replace(chunk, **chosen) if chosen else chunk
        self._counters.drafted += len(drawn) - 1
        self._counters.accepted += count - 1
        if self._drafts is not None:
            if expected is not None:
                self._drafts.advance(request.id, count, goes_on=right >= count and chunk.finish is None)
            elif first:
                self._drafts.begin(request.group, request.id, s.tokens, s.position)
            if chunk.finish:
                self._end_text(request.id)
        return chunk

    def _learn(self, work: Launch, chunks: Sequence[Chunk], step_s: float, searched_s: float) -> None:
        assert self._drafts is not None
        for r in work.prefill:
            self._drafts.leave(r.sequence.request.id)
        if self._counters.steps % LEARN_EVERY == 0:
            self._draft_length.observe_runs(self._drafts.runs)
        if work.rows and not work.prefill:
            batch = _batch(len(work.rows))
            self._draft_length.launched(batch, work.width)
            plain_s = self._draft_length.observe_step(batch, work.width, step_s)
            self._counters.decode_s += step_s
            self._counters.undrafted_s += plain_s * sum(len(c.tokens) for c in chunks) / len(chunks)
        if work.rows and work.width == 1:
            self._watch.observe(step_s=step_s, spent_s=searched_s)
            s = work.rows[self._watch.added % len(work.rows)]
            if self._watch.may_add and not s.finished:
                self._watch.add(s.request.id)

    def check(self) -> None:
        super().check()
        if self._drafts is not None:
            self._drafts.check()

    @property
    def asleep(self) -> bool:
        return self._runner.pools is None

    def _free_memory(self) -> None:
        self._runner.free()


def _decode_rows(s: SequenceState, expected: list[int], width: int) -> ScheduledRows:
    """The newest token, and as many of the expected ones as can be verified."""
    most = min(width, s.request.max_tokens - s.generated) - 1
    drafts = tuple(expected[:most])
    return ScheduledRows(s, len(s.tokens) - 1, len(s.tokens) + len(drafts), True, drafts)


def _batch(rows: int) -> int:
    """Numbers of responses whose steps take about the same time have the same number here."""
    return 1 << max(0, rows - 1).bit_length()
