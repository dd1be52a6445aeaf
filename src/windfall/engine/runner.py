"""Runs planned rows through the model: builds the flat batch, calls transformers' module, samples.

Two modes, one code path:

    fast            all rows of the step at once; sequences attend in blocks of similar context
    deterministic   tiles of exactly `TILE` rows, every row attending alone over a context padded by its own length
                    only: no shape and no order of summation depends on the neighbours, so neither does any bit

Deterministic costs padding (a lone response pays for TILE rows) and prefill is no cheaper than decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.engine.attention import Block, Paged
from windfall.engine.sampler import sample
from windfall.engine.scheduler import Rows
from windfall.types import Sampling

TILE = 16
TILE_PAGES = 4


@dataclass(frozen=True, slots=True)
class Row:
    token: int
    position: int
    pages: list[int]
    of: int
    """Which Rows it belongs to; -1 for padding."""


class Runner:
    def __init__(self, model: Any, *, pages: int, page_size: int, deterministic: bool) -> None:
        config = model.config
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # One page more than is handed out: padding rows write there.
        shape = (pages + 1, page_size, kv_heads, head)
        self.model, self.size, self.scratch, self.deterministic = model, page_size, pages, deterministic
        self.device = model.device
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=self.device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros_like(k) for k in self.keys]
        window = getattr(config, "sliding_window", None)
        self.windows = [window] if window else []

    @torch.inference_mode()
    def run(self, rows: Sequence[Rows]) -> list[tuple[int, float]]:
        """The new token and its log-prob for every Rows that samples, in order."""
        flat = [
            Row(s.tokens[i], i, s.pages, n)
            for n, r in enumerate(rows)
            for s in (r.sequence,)
            for i in range(r.start, r.stop)
        ]
        last = {n: r for n, r in enumerate(rows) if r.samples}
        out: dict[int, tuple[int, float]] = {}
        for tile in self._tiles(flat):
            ends = [i for i, row in enumerate(tile) if row.of in last and row.position == last[row.of].stop - 1]
            blocks = list(self._rowwise(tile) if self.deterministic else self._blocks(tile))
            logits = self._forward(tile, blocks, None if self.deterministic else ends)
            if not ends:
                continue
            asked: list[tuple[int, int, Sampling]] = [(0, 0, Sampling())] * logits.shape[0]
            at = ends if self.deterministic else range(len(ends))
            for i, end in zip(at, ends, strict=True):
                s = last[tile[end].of].sequence
                asked[i] = (s.request.seed, s.position, s.request.sampling)
            tokens, logprobs = sample(logits, *map(list, zip(*asked, strict=True)))  # pyright: ignore[reportArgumentType]
            token_list, logprob_list = tokens.tolist(), logprobs.tolist()
            for i, end in zip(at, ends, strict=True):
                out[tile[end].of] = (token_list[i], logprob_list[i])
        return [out[n] for n in last]

    def _forward(self, tile: Sequence[Row], blocks: Sequence[Block], ends: list[int] | None) -> Tensor:
        size = self.size
        slots = [row.pages[row.position // size] * size + row.position % size for row in tile]
        ids, positions, at = torch.tensor(
            [[row.token for row in tile], [row.position for row in tile], slots], device=self.device
        )
        keep = {} if ends is None else {"logits_to_keep": torch.tensor(ends, device=self.device, dtype=torch.long)}
        return self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            batch=Paged(self.keys, self.values, at, blocks),
            **keep,
        ).logits[0]

    def _tiles(self, flat: list[Row]) -> Iterator[list[Row]]:
        if not self.deterministic:
            yield flat
            return
        for start in range(0, len(flat), TILE):
            tile = flat[start : start + TILE]
            yield tile + [Row(0, 0, [self.scratch], -1)] * (TILE - len(tile))

    def _rowwise(self, tile: Sequence[Row]) -> Iterator[Block]:
        """Every row alone, over its own context rounded up to TILE_PAGES pages."""
        by_pages: dict[int, list[int]] = {}
        for i, row in enumerate(tile):
            pages = row.position // self.size + 1
            by_pages.setdefault(-(-pages // TILE_PAGES) * TILE_PAGES, []).append(i)
        for pages, indices in by_pages.items():
            yield self._block([[i] for i in indices], tile, pages)

    def _blocks(self, flat: Sequence[Row]) -> Iterator[Block]:
        """Sequences with equally many rows together; single rows sorted by context and split where padding would cost
        more than another block."""
        runs: dict[int, list[list[int]]] = {}
        start = 0
        for i in range(1, len(flat) + 1):
            if i == len(flat) or flat[i].of != flat[start].of:
                runs.setdefault(i - start, []).append(list(range(start, i)))
                start = i

        def pages(run: list[int]) -> int:
            return flat[run[-1]].position // self.size + 1

        for group in runs.values():
            group.sort(key=pages, reverse=True)
            begin = 0
            for i in range(1, len(group) + 1):
                if i == len(group) or (pages(group[i]) < 0.7 * pages(group[begin]) and i - begin >= 4):
                    yield self._block(group[begin:i], flat, pages(group[begin]))
                    begin = i

    def _block(self, runs: Sequence[list[int]], flat: Sequence[Row], pages: int) -> Block:
        table = [(flat[r[-1]].pages[:pages] + [self.scratch] * pages)[:pages] for r in runs]
        positions = torch.tensor([[flat[i].position for i in r] for r in runs], device=self.device)
        context = torch.arange(pages * self.size, device=self.device)
        dtype = self.keys[0].dtype

        def mask(window: int | None) -> Tensor:
            hidden = context > positions[..., None]
            if window is not None:
                hidden |= context <= positions[..., None] - window
            return torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))

        return Block(
            rows=torch.tensor([i for r in runs for i in r], device=self.device),
            queries=len(runs[0]),
            pages=torch.tensor(table, device=self.device).view(-1),
            sequences=len(runs),
            mask=mask(None),
            windowed={w: mask(w) for w in self.windows},
        )
