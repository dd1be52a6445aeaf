"""The device side of the engine: the KV pool, the state, and launches that the host does not wait for.

A launch uploads the changes of the host state, runs a prefill and a burst of decode steps, and copies the tokens into
host memory; an event signals their arrival. Tokens are written to a ring, as (tokens, bits of the log-probs): row 0 of
a launch has the tokens of the prefill, and every step adds `width` rows, with -1 where no token was accepted.

Rules:
- everything runs on the stream that is current at the time of the call, so launches overlap neither each other nor
  other work of the process on that stream (a trainer that shares the module);
- at most `DEPTH` launches are in flight: the ring and the host memory have room for one more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from windfall.engine.cuda.decoder import Decoder
from windfall.engine.cuda.graphs import GraphKey, Graphs, PrefillKey, SampleKey, batch_for, prefill_rows
from windfall.engine.cuda.host_state import HostState
from windfall.engine.cuda.splits import pack_spans, prefill_tile, spans_size
from windfall.engine.cuda.state import RUNS, DeviceState, KVPool, PrefixGroups, Spans, Texts, section
from windfall.engine.draft_length import WIDTHS
from windfall.engine.scheduler import Launch, ScheduledRows, widest

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV

DEPTH = 2
PREFIX_GROUP_SECTIONS = ("group_first", "group_count", "group_tokens", "shared_tokens")
ALIGN = 32  # every array of an upload starts at a multiple of this many int32 values


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingLaunch:
    """A launch whose tokens the engine has not returned yet."""

    work: Launch
    versions: Mapping[str, int]  # by policy
    sampled: Tensor  # (1 + steps * width, 2, batch) int32 in host memory; valid only after `wait`
    runs: Tensor | None  # (RUNS + 1,) int32 in host memory, likewise: see `Texts`; None: tokens are not drafted
    began: Any  # event before the launch; None without a GPU
    event: Any
    launch_s: float  # how long the host took for the launch; without a GPU, this is all of it

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait for the launch. Returns tokens and log-probs, (1 + steps * width, batch) each."""
        if self.event is not None:
            self.event.synchronize()
        both = self.sampled.numpy()
        return both[:, 0], both[:, 1].view(np.float32)

    def device_s(self) -> float:
        """How long the device took, after `wait` (seconds)."""
        return self.launch_s if self.event is None else self.began.elapsed_time(self.event) / 1000


class DeviceRunner:
    def __init__(
        self,
        decoder: Decoder,
        host_state: HostState,
        *,
        pages: int,
        page_size: int,
        burst: int,
        max_rows: int,
        kv: TenantKV | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`max_rows`: of a prefill. `kv`: memory that other engines share; otherwise the pool has its own, of
        `kv_dtype`."""
        self.decoder = decoder
        self.host_state = host_state
        self.burst = burst
        self.device = decoder.device
        self.pool = KVPool(
            layers=len(decoder.layers),
            pages=pages,
            page_size=page_size,
            kv_heads=decoder.kv_heads,
            head=decoder.head,
            dtype=kv_dtype or decoder.dtype,
            device=str(self.device),
            kv=kv,
        )
        decoder.build_rotary_tables(self._positions)
        self.buffer = torch.from_numpy(host_state.data.copy()).to(self.device)
        self.state = DeviceState.of(self.buffer, host_state)
        self._rows = section(self.buffer, host_state, "rows")
        self._ring_row = section(self.buffer, host_state, "ring_row", torch.int64)
        self._padding_rows = torch.full_like(self._rows, host_state.slots)
        self._prefix_groups = [section(self.buffer, host_state, n) for n in PREFIX_GROUP_SECTIONS]
        self._no_groups = torch.zeros_like(self._rows)
        batch, ring_size = len(self._rows), DEPTH + 1
        self.texts = None if host_state.texts is None else Texts.new(host_state.texts, self.device)
        self._widest = 1 if self.texts is None else WIDTHS[-1]
        self._sampled = torch.zeros(2, batch * self._widest, dtype=torch.int32, device=self.device)
        self._launch_rows = 1 + burst * self._widest
        self._ring = torch.zeros(ring_size * self._launch_rows, 2, batch, dtype=torch.int32, device=self.device)
        self._first_row = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._pinned = self.device.type == "cuda"
        self._host_tokens = torch.zeros(self._ring.shape, dtype=torch.int32, pin_memory=self._pinned)
        self._host_runs = torch.zeros(ring_size, RUNS + 1, dtype=torch.int32, pin_memory=self._pinned)
        self._uploads = [torch.zeros(0, dtype=torch.int32)] * ring_size
        self._launches = 0
        self._graphs: Graphs[GraphKey] = Graphs(self._step, self.device)
        self._prefills: Graphs[PrefillKey] = Graphs(self._prefill_pass, self.device)
        self._max_rows = max_rows
        most = self._prefill_key(max_rows, 1)
        self._prefill_input = torch.zeros(spans_size(most.rows, most.tiles), dtype=torch.int32, device=self.device)
        self._prefilled = [
            torch.zeros(most.rows, size, dtype=decoder.dtype, device=self.device) for size in decoder.sizes
        ]
        self._after_prefill: Graphs[SampleKey] = Graphs(self._sample_prefilled, self.device)
        self._wanted, self._wanted_slots = (section(self.buffer, host_state, n) for n in ("wanted", "wanted_slots"))
        self.batches: list[int] = []
        """Batch sizes to use, in ascending order; empty: as in graphs.py. With few sizes, few graphs are captured."""
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count if self._pinned else 1

    @torch.inference_mode()
    def launch(self, work: Launch, versions: Mapping[str, int]) -> PendingLaunch:
        began_s, ring_index = time.monotonic(), self._launches % (DEPTH + 1)
        self._launches += 1
        row = ring_index * self._launch_rows
        key = self.graph_key(work)
        prefill_key, sample_key = self._prefill_keys(work.prefill)
        if work.steps:  # captured before the launch is timed
            self._graphs.prepare(key)
        if prefill_key:
            self._prefills.prepare(prefill_key)
        if sample_key:
            self._after_prefill.prepare(sample_key)
        began = event = None
        if self._pinned:
            began = torch.cuda.Event(enable_timing=True)
            began.record()
        spans: list[np.ndarray] = []
        if prefill_key:
            rows_each = self._rows_each(prefill_key.tile)
            packed, wanted, slots = prefill_arrays(work.prefill, prefill_key, rows_each, self.host_state.slots)
            spans = [packed]
            if sample_key:
                self.host_state.set_wanted(wanted, slots, sample_key.batch)
        if work.steps:
            self.host_state.set_rows(work.slots, key.batch)
            if key.prefix_groups:
                self.host_state.set_prefix_groups(work.prefix_groups, key.batch, key.prefix_groups)
        self.host_state.set_ring_row(row if sample_key else row + 1)
        changes = [*self.host_state.take_changes(), *self._text_changes()]
        indices, values, text_indices, text_values, *on_device = self._upload(ring_index, [*changes, *spans])
        self.buffer.index_copy_(0, indices.long(), values)
        if self.texts is not None and len(text_indices):
            self.texts.data.index_copy_(0, text_indices.long(), text_values)
        if prefill_key:
            self._prefill_input[: len(on_device[0])].copy_(on_device[0])
            self._prefills.run(prefill_key)
        if sample_key:
            self._after_prefill.run(sample_key)
        if work.steps:
            self._graphs.run(key, work.steps)
        used = slice(row, row + 1 + work.steps * work.width)
        sampled, runs = self._host_tokens[used], None
        sampled.copy_(self._ring[used], non_blocking=True)
        if self.texts is not None:
            runs = self._host_runs[ring_index]
            runs.copy_(self.texts.runs, non_blocking=True)
        if self._pinned:
            event = torch.cuda.Event(enable_timing=True, blocking=True)
            event.record()
        return PendingLaunch(
            work=work,
            versions=versions,
            sampled=sampled,
            runs=runs,
            began=began,
            event=event,
            launch_s=time.monotonic() - began_s,
        )

    @property
    def _positions(self) -> int:
        """Positions that a row may have. A finished response is one token past its end, and drafts are further."""
        return self.host_state.pages_each * self.pool.page_size + 1 + WIDTHS[-1]

    def _text_changes(self) -> tuple[np.ndarray, np.ndarray]:
        none = np.zeros(0, np.int32)
        return (none, none) if self.host_state.texts is None else self.host_state.texts.take_changes()

    def graph_key(self, work: Launch) -> GraphKey:
        truncate = any(truncates(s.request.sampling) for s in work.rows)
        shared = int(work.prefix_groups[:, 2].max(initial=0))
        batch = self._batch(len(work.rows))
        return self._graph_key(batch, work.longest, truncate, len(work.prefix_groups), shared, work.width)

    def _batch(self, rows: int) -> int:
        """The batch size for this number of rows."""
        return next((size for size in self.batches if size >= rows), batch_for(rows))

    def _graph_key(
        self, batch: int, longest: int, truncate: bool, prefix_groups: int = 0, shared: int = 0, width: int = 1
    ) -> GraphKey:
        prefix_groups = _next_power_of_two(prefix_groups) if prefix_groups else 0
        prefix_splits = self._splits(prefix_groups, shared) if prefix_groups else 1
        return GraphKey(batch, truncate, self._splits(batch, longest), prefix_groups, prefix_splits, width)

    def _splits(self, count: int, longest: int) -> int:
        """Number of splits of the contexts of `count` rows or prefix groups."""
        return self.decoder.ops.splits_for(count, self.decoder.kv_heads, _next_power_of_two(longest), self._processors)

    @torch.inference_mode()
    def warm(self, batches: Sequence[int], longest: int, *, shorter: bool = False) -> None:
        """Compile kernels and capture the graphs of these batch sizes, without drafts and with any number of them that
        the engine may choose. All rows are padding: no state changes.
        `shorter`: also capture the graphs for contexts that are shorter than `longest`."""
        lengths = [1 << n for n in range(_next_power_of_two(longest).bit_length())] if shorter else [longest]
        for batch in batches:
            widths = [w for w in WIDTHS if w <= min(self._widest, widest(self._max_rows, batch))]
            for length, width in itertools.product(lengths, widths):
                self._graphs.prepare(self._graph_key(batch, length, False, width=width))
            fit = self.decoder.sharing().max_rows
            if self._pinned and batch >= fit > 1 and not shorter:  # kernels only: graphs are captured when needed
                self._step(self._graph_key(batch, longest, False, batch // fit, longest // 2), True)
        rows = {prefill_rows(n) for n in range(1, self._max_rows + 1)} if shorter else {min(64, self._max_rows)}
        for key in {self._prefill_key(n, longest) for n in rows for longest in (1, n)}:
            self._prefills.prepare(key)
        for batch in batches:
            self._after_prefill.prepare(SampleKey(batch, False))

    def set_decoder(self, decoder: Decoder) -> None:
        """Use this decoder from now on, because the module's weights have moved."""
        self._graphs.drop()
        self._prefills.drop()
        self._after_prefill.drop()
        self.decoder = decoder
        decoder.build_rotary_tables(self._positions)

    def _step(self, key: GraphKey, dry: bool) -> None:
        rows = (self._padding_rows if dry else self._rows)[: key.batch]
        logits, expected = self.decoder.decode(
            rows, self.state, self.pool, key.splits, self._prefix_groups_for(key, dry), self.texts, key.width
        )
        self._sample(logits, rows, key.truncate, None if self.texts is None else expected, key.width, dry)
        if self.texts is not None:
            self.decoder.ops.find_matches(rows, self.state, self.texts)

    def _samples(self, count: int) -> tuple[Tensor, Tensor]:
        """Memory for this number of tokens and log-probs."""
        return self._sampled[0, :count], self._sampled[1, :count].view(torch.float32)

    def _prefix_groups_for(self, key: GraphKey, dry: bool) -> PrefixGroups | None:
        if not key.prefix_groups:
            return None
        first, count, tokens, shared = [self._no_groups] * 4 if dry else self._prefix_groups
        n = key.prefix_groups
        return PrefixGroups(
            first=first[:n],
            count=count[:n],
            tokens=tokens[:n],
            shared_tokens=shared[: key.batch],
            splits=key.prefix_splits,
        )

    def _prefill_keys(self, prefill: Sequence[ScheduledRows]) -> tuple[PrefillKey | None, SampleKey | None]:
        """Keys of the two graphs of a prefill; None: it has no rows, or samples nothing."""
        counts = [p.stop - p.start for p in prefill]
        sampling = [p.sequence.request.sampling for p in prefill if p.samples]
        key = SampleKey(self._batch(len(sampling)), any(map(truncates, sampling))) if sampling else None
        return self._prefill_key(sum(counts), max(counts)) if counts else None, key

    def _prefill_key(self, rows: int, longest: int) -> PrefillKey:
        """`longest`: rows of the longest chunk."""
        size, tile = min(prefill_rows(rows), self._max_rows), prefill_tile(longest, self.decoder.dtype.itemsize)
        return PrefillKey(size, tile, size // self._rows_each(tile) + min(size, self.host_state.slots))

    def _rows_each(self, tile: int) -> int:
        """Rows of a tile of this many queries."""
        return max(1, tile // (self.decoder.heads // self.decoder.kv_heads))

    def _prefill_pass(self, key: PrefillKey, dry: bool) -> None:
        buffer = torch.zeros_like(self._prefill_input) if dry else self._prefill_input
        spans = Spans.of(buffer, key.rows, key.tiles, key.tile)
        if dry:
            spans.slot.fill_(self.host_state.slots)
        for kept, new in zip(self._prefilled, self.decoder.prefill(spans, self.state, self.pool), strict=True):
            kept[: key.rows].copy_(new)

    def _sample_prefilled(self, key: SampleKey, dry: bool) -> None:
        """Sample the tokens after the wanted rows of a prefill."""
        wanted, slots = (self._no_groups, self._padding_rows) if dry else (self._wanted, self._wanted_slots)
        attended, residual = (kept.index_select(0, wanted[: key.batch]) for kept in self._prefilled)
        groups = self.decoder.group_rows(slots[: key.batch], self.state)
        self._sample(self.decoder.logits(attended, residual, groups), slots[: key.batch], key.truncate, None, 1, dry)

    def _sample(
        self, logits: Tensor, rows: Tensor, truncate: bool, expected: Tensor | None, width: int, dry: bool
    ) -> None:
        """Sample `width` tokens for every row's slot, accept those that were expected, and write them to the ring."""
        tokens, logprobs = self._samples(len(logits))
        self.decoder.ops.sample(logits, rows, self.state, tokens, logprobs, truncate, width)
        out, at = (torch.empty_like(self._ring[:width]), self._first_row) if dry else (self._ring, self._ring_row)
        self.decoder.ops.accept(rows, self.state, self.texts, tokens, logprobs, expected, out, at, width)
        if not dry:
            self._ring_row.add_(width)

    def _upload(self, ring_index: int, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Upload all arrays in one copy, from host memory that no launch in flight reads."""
        starts = np.cumsum([0, *(-(-len(a) // ALIGN) * ALIGN for a in arrays)]).tolist()
        if len(self._uploads[ring_index]) < starts[-1]:
            self._uploads[ring_index] = torch.zeros(2 * starts[-1], dtype=torch.int32, pin_memory=self._pinned)
        sent = self._uploads[ring_index][: starts[-1]]
        values = sent.numpy()
        for a, at in zip(arrays, starts, strict=False):
            values[at : at + len(a)] = a
        on_device = sent.to(self.device, non_blocking=True)
        return [on_device[at : at + len(a)] for a, at in zip(arrays, starts, strict=False)]


def truncates(sampling: Any) -> bool:
    """Whether the request uses top-k or top-p."""
    return sampling.top_k > 0 or sampling.top_p < 1


def _next_power_of_two(n: int) -> int:
    """Used to round sizes up, so that there are few different graphs."""
    return 1 << max(0, n - 1).bit_length()


def prefill_arrays(prefill: Sequence[ScheduledRows], key: PrefillKey, rows_each: int, padding: int) -> list[np.ndarray]:
    """A prefill as arrays: what `Spans.of` reads, the rows whose logits are needed, and the slots of these rows.
    `rows_each`: rows of a tile. `padding`: the padding slot."""
    slot, count, start, samples = np.array(
        [(p.sequence.slot, p.stop - p.start, p.start, p.samples) for p in prefill], np.int32
    ).T
    ids = [t for p in prefill for t in p.sequence.tokens[p.start : p.stop]]
    spans = pack_spans(ids, slot, count, start, rows=key.rows, tiles=key.tiles, rows_each=rows_each, padding=padding)
    sampled = samples == 1
    return [spans, (np.cumsum(count, dtype=np.int32) - 1)[sampled], slot[sampled]]
