"""Runs scheduled rows through the model: builds the flat batch, calls transformers' module, samples.

There are two modes with one code path:

    fast            all rows of the step at once; sequences with contexts of similar length attend in one block
    deterministic   tiles of exactly `TILE` rows; every row attends alone, with padding that depends only on its own
                    position. No shape and no order of summation depends on other rows, so no bit of the result does

The deterministic mode costs padding (a single response pays for TILE rows), and its prefill is as slow as decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.engine.scheduler import ScheduledRows
from windfall.engine.scheduler import Sequence as SequenceState
from windfall.engine.torch.adapters import TorchAdapters
from windfall.engine.torch.arena import TenantKV
from windfall.engine.torch.expert_cache import ExpertCache
from windfall.engine.torch.prepacked import drop_copies, prepacked
from windfall.engine.torch.sampler import sample
from windfall.models.attention import Block, Paged, cache_shapes
from windfall.types import Sampling

TILE = 16
TILE_PAGES = 4


Sampled = tuple[int, float]
"""A token and its log-prob."""


class RowSpan(NamedTuple):
    """Consecutive rows of one sequence that attend together: `count` rows, starting at row `first` of the batch. The
    last one is at index `position` of the sequence."""

    first: int
    count: int
    position: int
    pages: list[int]


class Runner:
    def __init__(
        self,
        model: Any,
        *,
        pages: int,
        page_size: int,
        deterministic: bool,
        kv: TenantKV | None = None,
        adapters: bool = False,
        experts: bool = False,
    ) -> None:
        """`kv`: memory that another engine shares; by default, the runner allocates its own. `adapters`: rows may use
        adapters. `experts`: remember which experts compute each token, if the model has some."""
        self.model = model if deterministic else prepacked(model)
        self.adapters = TorchAdapters(self.model, whole=deterministic) if adapters else None
        if self.adapters is not None:
            self.model = self.adapters.tree
        self.size = page_size
        self.deterministic = deterministic
        self._kv = kv
        self.scratch = pages if kv is None else kv.scratch
        self.device = model.device
        self._shapes = cache_shapes(model)
        self.experts = ExpertCache.of(self.model, self.scratch + 1, page_size) if experts and kv is None else None
        self.pools: list[tuple[Tensor, Tensor]] | None = None
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory of the KV cache, unless it is allocated already."""
        if self._kv is not None:
            self.pools = self.pools or self._kv.views(self._shapes, self.model.dtype)
            self._kv.clear_moved()
        elif self.pools is None:
            # One page more than the scheduler has: padding rows write there.
            size = (self.scratch + 1, self.size)
            kind: dict[str, Any] = {"dtype": self.model.dtype, "device": self.device}
            self.pools = [
                (torch.zeros(*size, *s.keys, **kind), torch.zeros(*size, *s.values, **kind)) for s in self._shapes
            ]

    def free(self) -> None:
        """Return the memory of the KV cache to the device. The contents are lost."""
        self.pools = None
        self.forget_weights()
        if self._kv is None and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget_weights(self) -> None:
        """The model has other weights, or will have them before the next step."""
        drop_copies(self.model)

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRows]) -> list[list[Sampled]]:
        """For every entry that samples, in order: the token after its last known one, and after each of its drafts."""
        return self._run_tiles(rows) if self.deterministic else self._run_batch(rows)

    def _run_batch(self, rows: Sequence[ScheduledRows]) -> list[list[Sampled]]:
        tokens: list[int] = []
        spans: list[RowSpan] = []
        # Sequences with the same number of rows are adjacent, longest context first: a block of rows is then a slice.
        order = sorted(range(len(rows)), key=lambda n: (rows[n].start - rows[n].stop, -rows[n].stop))
        for r in (rows[n] for n in order):
            spans.append(RowSpan(len(tokens), r.stop - r.start, r.stop - 1, r.sequence.pages))
            tokens += r.tokens
        sampling = [(n, i) for n in order for i in rows[n].sampling]
        starts = {n: s.first - rows[n].start for s, n in zip(spans, order, strict=True)}
        ends = [starts[n] + i for n, i in sampling]
        if self.adapters is not None:
            self.adapters.set_rows([rows[n].sequence.adapter for n in order for _ in rows[n].tokens], ends)
        logits = self._forward(tokens, spans, list(self._blocks(spans)), ends)
        new = self._sample(logits, [(rows[n].sequence, i) for n, i in sampling])
        return _by_entry(rows, dict(zip(sampling, new, strict=True)))

    def _run_tiles(self, rows: Sequence[ScheduledRows]) -> list[list[Sampled]]:
        flat = [(n, i, token) for n, r in enumerate(rows) for i, token in enumerate(r.tokens, r.start)]
        sampled: dict[tuple[int, int], Sampled] = {}
        for start in range(0, len(flat), TILE):
            # Rows of a tile may be in any order: every layer writes all keys before any row reads them.
            tile = sorted(flat[start : start + TILE], key=lambda row: -self._own_pages(row[1]))
            padding = TILE - len(tile)
            spans = [RowSpan(at, 1, i, rows[n].sequence.pages) for at, (n, i, _) in enumerate(tile)]
            spans += [RowSpan(len(tile) + at, 1, 0, [self.scratch]) for at in range(padding)]
            tokens = [token for _, _, token in tile] + [0] * padding
            if self.adapters is not None:
                self.adapters.set_rows([rows[n].sequence.adapter for n, _, _ in tile] + [-1] * padding, None)
            logits = self._forward(tokens, spans, list(self._rowwise(spans)), None)
            new = self._sample(logits, [(rows[n].sequence, i) for n, i, _ in tile] + [None] * padding)
            sampled |= {(n, i): token for (n, i, _), token in zip(tile, new, strict=False)}
        return _by_entry(rows, sampled)

    def _own_pages(self, position: int) -> int:
        """Padded context of a row at `position`, in pages. It depends on the position alone."""
        return -(-(position // self.size + 1) // TILE_PAGES) * TILE_PAGES

    def _forward(self, tokens: list[int], spans: list[RowSpan], blocks: list[Block], ends: list[int] | None) -> Tensor:
        """Logits of the rows `ends`, or of all rows if that is None."""
        size = self.size
        rows = [(s.pages, p) for s in spans for p in range(s.position - s.count + 1, s.position + 1)]
        slots = [pages[p // size] * size + p % size for pages, p in rows]
        ids, at, into = torch.tensor([tokens, [p for _, p in rows], slots], device=self.device)
        keep = {} if ends is None else {"logits_to_keep": torch.tensor(ends, device=self.device, dtype=torch.long)}
        assert self.pools is not None, "the memory of the KV cache is not allocated"
        batch = Paged(iter(self.pools), into, blocks)
        with nullcontext() if self.experts is None else self.experts.recording(slots):
            passed = self.model(input_ids=ids[None], position_ids=at[None], use_cache=False, batch=batch, **keep)
        return passed.logits[0]

    def _sample(self, logits: Tensor, rows: Sequence[tuple[SequenceState, int] | None]) -> list[Sampled]:
        """The tokens after these indices of these sequences. None: a row that pads a tile."""
        if not rows:
            return []
        tokens, logprobs = sample(
            logits,
            [r[0].request.seed if r else 0 for r in rows],
            # Rows of a tile sample in the middle of a prompt, too; these tokens are not used.
            [max(0, r[0].position + r[1] + 1 - len(r[0].tokens)) if r else 0 for r in rows],
            [r[0].request.sampling if r else Sampling() for r in rows],
        )
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def _rowwise(self, spans: Sequence[RowSpan]) -> Iterator[Block]:
        """Blocks in which every row attends alone to its own context."""
        for pages, group in groupby(spans, key=lambda s: self._own_pages(s.position)):
            yield self._block(list(group), pages)

    def _blocks(self, spans: Sequence[RowSpan]) -> Iterator[Block]:
        """Blocks of similar rows: a new one starts where the number of rows changes, or where padding would cost more
        than another block."""
        pages = [s.position // self.size + 1 for s in spans]
        begin = 0
        for i in range(1, len(spans)):
            same_count = spans[i].count == spans[begin].count
            if not same_count or (i - begin >= 4 and pages[i] < 0.7 * pages[begin]):
                yield self._block(spans[begin:i], pages[begin])
                begin = i
        yield self._block(spans[begin:], pages[begin])

    def _block(self, spans: Sequence[RowSpan], pages: int) -> Block:
        padding, count = [self.scratch] * pages, spans[0].count
        table = torch.tensor([(s.pages[:pages] + padding)[:pages] for s in spans], device=self.device)
        last = torch.tensor([s.position for s in spans], device=self.device)
        positions = last[:, None] + torch.arange(1 - count, 1, device=self.device)
        context = torch.arange(pages * self.size, device=self.device)
        return Block(spans[0].first, table.view(-1), positions, context)


def _by_entry(rows: Sequence[ScheduledRows], sampled: Mapping[tuple[int, int], Sampled]) -> list[list[Sampled]]:
    return [[sampled[n, i] for i in r.sampling] for n, r in enumerate(rows) if r.samples]
