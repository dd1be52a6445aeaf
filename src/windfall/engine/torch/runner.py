"""Runs scheduled rows through the model: builds the flat batch, calls transformers' module, samples.

There are two modes with one code path:

    fast            all rows of the step at once; sequences with contexts of similar length attend in one block
    deterministic   tiles of exactly `TILE` rows; every row attends alone, with padding that depends only on its own
                    position. No shape and no order of summation depends on other rows, so no bit of the result does

The deterministic mode costs padding (a single response pays for TILE rows), and its prefill is as slow as decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from windfall.engine.scheduler import ScheduledRows
from windfall.engine.scheduler import Sequence as SequenceState
from windfall.engine.torch.arena import TenantKV
from windfall.engine.torch.sampler import sample
from windfall.models.attention import Block, Paged, cache_shapes
from windfall.types import Sampling

TILE = 16
TILE_PAGES = 4


class RowSpan(NamedTuple):
    """Consecutive rows of one sequence that attend together: `count` rows, starting at row `first` of the batch. The
    last one is at index `position` of the sequence."""

    first: int
    count: int
    position: int
    pages: list[int]


class Runner:
    def __init__(
        self, model: Any, *, pages: int, page_size: int, deterministic: bool, kv: TenantKV | None = None
    ) -> None:
        """`kv`: memory that another engine shares; by default, the runner allocates its own."""
        self.model = model
        self.size = page_size
        self.deterministic = deterministic
        self._kv = kv
        self.scratch = pages if kv is None else kv.scratch
        self.device = model.device
        self._shapes = cache_shapes(model)
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
        if self._kv is None and self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def run(self, rows: Sequence[ScheduledRows]) -> list[tuple[int, float]]:
        """The new token and its log-prob for every entry that samples, in order."""
        return self._run_tiles(rows) if self.deterministic else self._run_batch(rows)

    def _run_batch(self, rows: Sequence[ScheduledRows]) -> list[tuple[int, float]]:
        tokens: list[int] = []
        spans: list[RowSpan] = []
        # Sequences with the same number of rows are adjacent, longest context first: a block of rows is then a slice.
        order = sorted(range(len(rows)), key=lambda n: (rows[n].start - rows[n].stop, -rows[n].stop))
        for r in (rows[n] for n in order):
            spans.append(RowSpan(len(tokens), r.stop - r.start, r.stop - 1, r.sequence.pages))
            tokens += r.sequence.tokens[r.start : r.stop]
        sampling = [n for n in order if rows[n].samples]
        ends = [s.first + s.count - 1 for s, n in zip(spans, order, strict=True) if rows[n].samples]
        logits = self._forward(tokens, spans, list(self._blocks(spans)), ends)
        sampled = dict(zip(sampling, self._sample(logits, [rows[n].sequence for n in sampling]), strict=True))
        return [sampled[n] for n, r in enumerate(rows) if r.samples]

    def _run_tiles(self, rows: Sequence[ScheduledRows]) -> list[tuple[int, float]]:
        flat = [(n, r.sequence, i) for n, r in enumerate(rows) for i in range(r.start, r.stop)]
        sampled: dict[int, tuple[int, float]] = {}
        for start in range(0, len(flat), TILE):
            # Rows of a tile may be in any order: every layer writes all keys before any row reads them.
            tile = sorted(flat[start : start + TILE], key=lambda row: -self._own_pages(row[2]))
            padding = TILE - len(tile)
            spans = [RowSpan(at, 1, i, s.pages) for at, (_, s, i) in enumerate(tile)]
            spans += [RowSpan(len(tile) + at, 1, 0, [self.scratch]) for at in range(padding)]
            tokens = [s.tokens[i] for _, s, i in tile] + [0] * padding
            logits = self._forward(tokens, spans, list(self._rowwise(spans)), None)
            new = self._sample(logits, [s for _, s, _ in tile] + [None] * padding)
            sampled |= {n: token for (n, _, i), token in zip(tile, new, strict=False) if i == rows[n].stop - 1}
        return [sampled[n] for n, r in enumerate(rows) if r.samples]

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
        return self.model(input_ids=ids[None], position_ids=at[None], use_cache=False, batch=batch, **keep).logits[0]

    def _sample(self, logits: Tensor, sequences: Sequence[SequenceState | None]) -> list[tuple[int, float]]:
        if not sequences:
            return []
        tokens, logprobs = sample(
            logits,
            [s.request.seed if s else 0 for s in sequences],
            [s.position if s else 0 for s in sequences],
            [s.request.sampling if s else Sampling() for s in sequences],
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
