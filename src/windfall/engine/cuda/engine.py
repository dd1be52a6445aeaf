"""The engine on a GPU: requests in, a stream of tokens out, and the device never waits for the host.

    step():  plan and launch the next work  ──▶  return the tokens of the previous launch
                                                 (while the new one runs)

`GraphEngine` implements the same protocol as `TorchEngine`, with these differences:

- a chunk may have several tokens, and `step` may return no chunks while the first launch runs;
- the host learns that a response has ended when it reads the tokens. What the device computed for the response after
  its end is discarded and not counted;
- `swap` first waits for the launches in flight; the next `step` returns their tokens, and only these, with the version
  that generated them;
- `sleep` frees the memory of the KV pool. Responses keep their tokens; the next `step` that has work allocates the
  memory and prefills again;
- an evicted response may keep its keys and values in host memory, unless its pages are in memory that another engine
  shares: that engine's requests would wait for the copies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from windfall.engine.base import duplicate_id
from windfall.engine.cuda.adapters import DeviceAdapters
from windfall.engine.cuda.decoder import Decoder
from windfall.engine.cuda.device import DEPTH, DeviceRunner, PendingLaunch
from windfall.engine.cuda.graphs import batch_for
from windfall.engine.cuda.host_pages import HostPages
from windfall.engine.cuda.host_state import STOPS, HostState
from windfall.engine.cuda.splits import PrefixSharing
from windfall.engine.cuda.texts import MAX_LENGTH, TextRows
from windfall.engine.draft_length import WIDTHS, DraftLength
from windfall.engine.drafts import RUNS
from windfall.engine.paged import PagedEngine, Shape
from windfall.engine.pages import Pages
from windfall.engine.saved_kv import SavedKV
from windfall.engine.scheduler import Launch, Scheduler
from windfall.engine.scheduler import Sequence as SequenceState
from windfall.free_memory import free_bytes
from windfall.types import Capabilities, Chunk, Request

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV

BURST = 8  # Decode steps per launch. The host notices the end of a response at most twice this many tokens late.
TEXTS_EVERY = 16
"""Launches after which responses without a text get the rows that became free. For that the host collects all tokens
first, so the device waits for one launch."""


class GraphEngine(PagedEngine):
    capabilities = Capabilities(name="cuda")

    def __init__(
        self,
        model: Any,
        *,
        kv_tokens: int,
        page_size: int = 16,
        max_running: int = 256,
        max_rows: int = 2048,
        version: int = 0,
        longest: int | None = None,
        burst: int = BURST,
        ops: Any = None,
        sharing: PrefixSharing | None = None,
        kv: TenantKV | None = None,
        speculation: bool = False,
        text_tokens: int | None = None,
        kv_dtype: torch.dtype | None = None,
        adapters: int = 0,
        adapter_rank: int = 0,
    ) -> None:
        """`longest`: upper limit for the tokens of a response and its prompt. `ops`: kernels to use instead of the
        device's. `sharing`: which siblings form prefix groups; by default, groups are as large as fits. `kv`: pages in
        memory that another engine shares; then `kv_tokens` and `page_size` do not count. `speculation`: draft tokens
        from the texts of siblings where that is faster. `text_tokens`: tokens of a response and its prompt up to which
        it drafts, if fewer than `longest`: then there is room for more texts. `kv_dtype`: of the KV cache, if not that
        of the model. `adapters`, `adapter_rank`: as in EngineSpec."""
        if kv is not None:
            page_size = kv.pages.size
            kv_tokens = kv.pages.capacity * page_size
        count = -(-kv_tokens // page_size)
        each = min(count, -(-((longest or kv_tokens) + 1) // page_size))
        slots = min(max_running, max_rows)
        texts = None
        if speculation and kv is None:
            tokens = min(text_tokens or MAX_LENGTH, each * page_size)
            texts = TextRows(slots=slots, length=min(tokens + 2, MAX_LENGTH))
        host_state = HostState(slots=slots, pages_each=each, batch=batch_for(slots), texts=texts)
        held = DeviceAdapters(model, count=adapters, rank=adapter_rank) if adapters else None
        decoder = Decoder.of(model, ops, held)
        fit = decoder.sharing()
        pages = Pages(count, page_size) if kv is None else kv.pages
        scheduler = Scheduler(
            pages,
            slots=slots,
            max_rows=max_rows,
            burst=burst,
            host_state=host_state,
            sharing=replace(sharing, max_rows=min(sharing.max_rows, fit.max_rows)) if sharing else fit,
        )
        if kv is not None:
            scheduler.single_step_with_prefill, scheduler.prefills_per_decode = True, 1
        super().__init__(model, scheduler, version=version, limit=each * page_size - 1, kv=kv)
        self.capabilities = replace(self.capabilities, drafts=texts is not None)
        if held is not None:
            self._hold_adapters(held, adapters, adapter_rank)
        self._texts = texts
        self._texts_age = 0  # launches since rows were given to responses without a text
        self._draft_length = None if texts is None else DraftLength(WIDTHS)
        self._drafted = np.zeros(1, np.int32)  # tokens that the device has drafted; the number may wrap around
        self._device = DeviceRunner(
            decoder,
            host_state,
            pages=count,
            page_size=page_size,
            burst=burst,
            max_rows=max_rows,
            kv=kv,
            kv_dtype=kv_dtype,
        )
        if kv_dtype is not None:
            self.capabilities = replace(self.capabilities, kv_dtype="fp8")
        if kv is None:
            scheduler.saved = SavedKV(
                page_size=page_size, page_bytes=self._device.pool.page_bytes, max_rows=max_rows, free_bytes=free_bytes
            )
            self._host_pages = HostPages(self._device.pool, scheduler.saved.chunk_pages)
        self.burst = burst
        self.depth = DEPTH
        self._pending: deque[PendingLaunch] = deque()
        self._ready: deque[list[Chunk]] = deque()  # what the next steps return: in a list, a policy has one version
        self._ready_finished = 0  # number of responses whose last chunk is in `_ready`

    def __len__(self) -> int:
        return len(self._sequences) + self._ready_finished

    @property
    def asleep(self) -> bool:
        return self._device.pool.data is None

    def add(self, request: Request) -> None:
        if any(c.id == request.id for chunks in self._ready for c in chunks):
            raise duplicate_id(request)
        super().add(request)

    def cancel(self, id: str) -> None:
        super().cancel(id)
        self._end_text(id)
        for n, chunks in enumerate(self._ready):
            self._ready_finished -= sum(c.id == id and c.finish is not None for c in chunks)
            self._ready[n] = [c for c in chunks if c.id != id]

    def remember(self, group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        if self._texts is not None:
            self._texts.remember(group, id, position, tokens)

    def _end_text(self, id: str) -> None:
        if self._texts is not None:
            self._texts.end(id)

    @property
    def unread(self) -> bool:
        return bool(self._pending or self._ready)

    @property
    def launched(self) -> list[tuple[Shape, int]]:
        out: list[tuple[Shape, int]] = []
        for work in (p.work for p in self._pending):
            if work.prefill and work.steps > 1:  # the prefill comes with the first step
                out += [(work.shape, 1), ((len(work.rows), work.shape[1], False), work.steps - 1)]
            else:
                out.append((work.shape, max(1, work.steps)))
        return out

    def step(self, most_rows: int | None = None, most_steps: int | None = None, prefill: bool = True) -> list[Chunk]:
        self.last_step = (0, 0, False)
        self.last_steps = 1
        self.device_s = None
        may_launch = most_rows != 0 and len(self._pending) < self.depth and not (self._pending and self._texts_due)
        launched = may_launch and self._launch(most_rows, most_steps, prefill)
        if self._ready:
            self._ready_finished -= sum(c.finish is not None for c in self._ready[0])
            return self._ready.popleft()
        if self._pending and (not launched or len(self._pending) >= self.depth):
            return self._collect(self._pending.popleft())
        limited = most_rows is not None or self.kv is not None
        assert launched or limited or not self._sequences, "there is work, but nothing was launched"
        return []

    def swap(self, version: int, weights: Mapping[str, Tensor] | None = None, *, policy: str = "") -> None:
        super().swap(version, weights, policy=policy)
        if self._device.decoder.stale():
            assert not self.capabilities.adapters, "the weights of an engine with adapters have moved"
            self._device.set_decoder(Decoder.of(self.model, self._device.decoder.ops))

    def _free_memory(self) -> None:
        self._device.pool.free()
        if self._scheduler.saved is not None:
            self._scheduler.saved.release()
            self._host_pages.free()

    def wake(self) -> None:
        self._device.pool.allocate()

    def warm(self, *sizes: int, longest: int | None = None, shorter: bool = False) -> None:
        """Compile the kernels and capture the graphs for these numbers of responses, of up to `longest` tokens.
        `shorter`: also for shorter contexts, so that no step has to capture one."""
        slots = self._scheduler.slots
        self.wake()
        batches = sorted({batch_for(min(size, slots)) for size in sizes or (slots,)})
        self._device.warm(batches, min(longest or self.limit, self.limit), shorter=shorter)

    def warm_sizes(self, longest: int) -> None:
        """Capture graphs for a few batch sizes and all contexts up to `longest`, and use only these from now on: no
        step has to capture one, unless a response uses top-k or top-p."""
        slots = self._scheduler.slots
        sizes = [2**n for n in range(slots.bit_length()) if 2**n < slots]
        batches = self._device.batches = sorted({batch_for(size) for size in [*sizes, slots * 3 // 4, slots] if size})
        self._device.warm(batches, min(longest, self.limit), shorter=True)

    def _launch(self, most_rows: int | None, most_steps: int | None, prefill: bool) -> bool:
        if not self._sequences:
            return False
        if self.asleep:
            self.wake()
        if self._texts_due:
            self._assign_texts()
        work = self._scheduler.next(
            in_flight=bool(self._pending),
            most_rows=most_rows,
            most_steps=most_steps,
            may_prefill=prefill,
            width=self._choose_width(),
        )
        if self.kv is not None:
            self.kv.clear_moved()  # on the stream of all launches: those in flight have written what they had to
        if self._scheduler.saved is not None:
            self._host_pages.run(self._scheduler.saved.take_copies())
        if work is None:
            return False
        self._pending.append(self._device.launch(work, self.versions))
        self._texts_age += 1
        if self._draft_length is not None and work.steps and not work.prefill:
            self._draft_length.launched(batch_for(len(work.rows)), work.width)
        self._counters.steps += work.steps + bool(work.prefill)
        prefilled = sum(p.stop - p.start for p in work.prefill)
        self._counters.rows += prefilled
        self._counters.prefilled += prefilled
        return True

    def _choose_width(self) -> int:
        if self._draft_length is None:
            return 1
        scheduler = self._scheduler
        batch, measured = batch_for(max(1, scheduler.decoding)), not scheduler.can_prefill
        return self._draft_length.choose(batch, scheduler.widest, measured=measured)

    @property
    def _texts_due(self) -> bool:
        texts = self._texts
        return texts is not None and self._texts_age >= TEXTS_EVERY and bool(texts.without and texts.available)

    def _assign_texts(self) -> None:
        """Give free rows to running responses without a text. Nothing is in flight, so all their tokens are known."""
        assert self._texts is not None and self._scheduler.host_state is not None and not self._pending
        self._texts_age = 0
        for s in [self._sequences[id] for id in self._texts.without][: self._texts.available]:
            if s.slot >= 0:
                self._scheduler.host_state.assign_text(s.slot, s.request, s.tokens)

    def finish_launches(self) -> None:
        while self._pending:
            chunks = self._collect(self._pending.popleft())
            if chunks:
                self._ready.append(chunks)
                self._ready_finished += sum(c.finish is not None for c in chunks)

    def _collect(self, pending: PendingLaunch) -> list[Chunk]:
        """The tokens of a launch, as one chunk for every response that got any."""
        tokens, logprobs = pending.wait()
        self.device_s = pending.device_s()
        work, out, computed = pending.work, [], 0
        if self._scheduler.saved is not None:
            self._scheduler.saved.observe_launch(work, self.device_s)
            for copied_bytes, seconds in self._host_pages.measured():
                self._scheduler.saved.observe_copy(copied_bytes, seconds)
        if work.prefill and work.steps > 1:
            self.last_step = (0, 0, False)  # of different shapes
        else:
            self.last_step = work.shape
            self.last_steps = max(1, work.steps)
        sampled = [p.sequence for p in work.prefill if p.samples]
        prefilled = dict(zip(sampled, zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True), strict=False))
        steps, step_logprobs = tokens[1:, : len(work.rows)].T, logprobs[1:, : len(work.rows)].T
        accepted = steps >= 0  # (responses, steps * width)
        counts = accepted.sum(1)
        self._scheduler.collected(work, counts)
        if self._draft_length is not None and pending.runs is not None:
            self._learn(work, accepted, pending)
        flat_tokens, flat_logprobs, end = steps[accepted].tolist(), step_logprobs[accepted].tolist(), 0
        for sequence, count in zip(work.rows, counts.tolist(), strict=True):
            begin, end = end, end + count
            first = prefilled.pop(sequence, None)
            if sequence.finished or not (count or first):
                continue
            computed += count
            new_tokens, new_logprobs = flat_tokens[begin:end], flat_logprobs[begin:end]
            if first:
                new_tokens, new_logprobs = [first[0], *new_tokens], [first[1], *new_logprobs]
            stop = sequence.request.stop
            if len(stop) > STOPS:  # more than the device checks
                last = next((n + 1 for n, t in enumerate(new_tokens) if t in stop), len(new_tokens))
                new_tokens, new_logprobs = new_tokens[:last], new_logprobs[:last]
            out.append(self._append(sequence, new_tokens, new_logprobs, pending.versions))
        self._counters.rows += computed
        for sequence, first in prefilled.items():  # a response with max_tokens 1 has no row in the burst
            if not sequence.finished:
                out.append(self._append(sequence, [first[0]], [first[1]], pending.versions))
        return out

    def _learn(self, work: Launch, accepted: np.ndarray, pending: PendingLaunch) -> None:
        assert self._draft_length is not None and pending.runs is not None
        runs, drafted = np.split(pending.runs.numpy(), [RUNS])
        self._draft_length.observe_runs(runs)
        self._counters.drafted += int((drafted - self._drafted)[0])
        self._drafted = drafted.copy()
        per_step = accepted.reshape(len(work.rows), work.steps, work.width).sum(2)
        self._counters.accepted += int(per_step.sum() - (per_step > 0).sum())
        if work.steps and not work.prefill and self.device_s:
            batch, step_s = batch_for(len(work.rows)), self.device_s / work.steps
            self._counters.decode_s += self.device_s
            plain_s = work.steps * self._draft_length.observe_step(batch, work.width, step_s)
            self._counters.undrafted_s += plain_s * (float(per_step[per_step > 0].mean()) if per_step.any() else 1.0)

    def _append(self, s: SequenceState, tokens: list[int], logprobs: list[float], versions: Mapping[str, int]) -> Chunk:
        if self._texts is not None:
            self._texts.extended(s.request.id, len(tokens))
        chunk = super()._append(s, tokens, logprobs, versions)
        if chunk.finish:
            self._end_text(chunk.id)
        return chunk

    def check(self) -> None:
        super().check()
        if self._texts is not None:
            self._texts.check()
        assert len(self._pending) <= DEPTH, "too many launches in flight"
