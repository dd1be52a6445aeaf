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
  memory and prefills again.

Without a GPU the same engine runs on the reference kernels in plain torch: slow, for tests.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from windfall.engine.base import Counters
from windfall.engine.cuda.decoder import Decoder
from windfall.engine.cuda.device import DEPTH, DeviceRunner, PendingLaunch
from windfall.engine.cuda.graphs import batch_for
from windfall.engine.cuda.host_state import HostState
from windfall.engine.cuda.plan import BatchPlanner, DeviceSequence
from windfall.engine.cuda.splits import PrefixSharing
from windfall.engine.cuda.state import STOPS
from windfall.engine.pages import Pages
from windfall.engine.retention import Retention
from windfall.engine.torch.engine import check_request, copy_weights
from windfall.errors import WindfallError
from windfall.types import Capabilities, Chunk, Finish, Request

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV

BURST = 8  # Decode steps per launch. The host notices the end of a response at most twice this many tokens late.


class GraphEngine:
    capabilities = Capabilities(name="cuda")

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
        longest: int | None = None,
        burst: int = BURST,
        ops: Any = None,
        sharing: PrefixSharing | None = None,
        keep_share: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
        kv: TenantKV | None = None,
    ) -> None:
        """`longest`: upper limit for the tokens of a response and its prompt. `ops`: kernels to use instead of the
        device's. `sharing`: which siblings form prefix groups; by default, groups are as large as fits. `keep_share`:
        share of the KV pool for sessions whose environment works. `kv`: pages in memory that another engine shares;
        then `kv_tokens` and `page_size` do not count."""
        if deterministic:
            raise WindfallError("the GPU engine has no deterministic mode", fix="Use TorchEngine on a CPU.")
        if kv is not None:
            page_size = kv.pages.size
            kv_tokens = kv.pages.capacity * page_size
        pages = -(-kv_tokens // page_size)
        each = min(pages, -(-((longest or kv_tokens) + 1) // page_size))
        self.model, self.version, self.kv = model, version, kv
        self.limit = each * page_size - 1
        slots = min(max_running, max_rows)
        host_state = HostState(slots=slots, pages_each=each, batch=batch_for(slots), stops=STOPS)
        decoder = Decoder.of(model, ops)
        fit = decoder.sharing()
        sharing = replace(sharing, max_rows=min(sharing.max_rows, fit.max_rows)) if sharing else fit
        pool = Pages(pages, page_size) if kv is None else kv.pages
        retention = Retention(pool, share=keep_share, clock=clock)
        self._plan = BatchPlanner(
            pool, host_state, max_rows=max_rows, burst=burst, sharing=sharing, retention=retention
        )
        self._plan.single_step_with_prefill = kv is not None
        self.forget, self.take_dropped, self.evict_kept = retention.forget, retention.take_dropped, retention.evict
        self._device = DeviceRunner(decoder, host_state, pages=pages, page_size=page_size, burst=burst, kv=kv)
        self.burst = burst
        """Upper limit for the decode steps of a launch."""
        self.depth = DEPTH
        """Upper limit for the launches in flight. 1: `step` returns the tokens of its own launch."""
        self.last_step = (0, 0, False)
        """Rows of a step of the launch whose tokens were returned last, the tokens that they attended to, and whether
        it had a prefill. 0: no launch, or one whose steps differ."""
        self.last_steps = 1
        """Number of steps of that launch."""
        self.device_s: float | None = None
        """How long the device took for that launch (seconds); None: no launch."""
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._sequences: dict[str, DeviceSequence] = {}
        self._pending: deque[PendingLaunch] = deque()
        self._ready: deque[list[Chunk]] = deque()  # chunks that the next steps return; each list has one version
        self._ready_finished = 0  # number of responses whose last chunk is in `_ready`
        self._steps = self._rows = self._generated = self._prefilled = 0

    def __len__(self) -> int:
        """Number of responses whose last token has not been returned."""
        return len(self._sequences) + self._ready_finished

    @property
    def counters(self) -> Counters:
        p = self._plan
        return Counters(
            steps=self._steps, rows=self._rows, generated=self._generated,
            reused_tokens=p.reused_tokens, preemptions=p.preemptions, waiting=len(p.waiting), lookups=p.lookups,
            hits=p.hits, prefilled=self._prefilled, kept_sessions=len(p.retention),
            kept_tokens=p.retention.page_count * p.pages.size,
        )  # fmt: skip

    @property
    def asleep(self) -> bool:
        return self._device.pool.data is None

    def add(self, request: Request) -> None:
        if request.id in self._sequences or any(c.id == request.id for chunks in self._ready for c in chunks):
            raise WindfallError("this id is already being generated", where=f"request {request.id}")
        check_request(request, self._vocabulary, self.limit)
        sequence = self._sequences[request.id] = DeviceSequence(request, list(request.prompt))
        self._plan.add(sequence)

    def cancel(self, id: str) -> None:
        """Stop this response. An unknown id is not an error: the response may just have finished."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._plan.remove(sequence)
        for n, chunks in enumerate(self._ready):
            self._ready_finished -= sum(c.id == id and c.finish is not None for c in chunks)
            self._ready[n] = [c for c in chunks if c.id != id]

    @property
    def sequences(self) -> list[DeviceSequence]:
        """All responses in the order in which they are computed. For reading only."""
        return [*self._plan.running, *self._plan.waiting]

    @property
    def prefill_rows(self) -> int:
        """Rows that are still to be prefilled."""
        return self._plan.prefill_rows

    @property
    def prefilling(self) -> int:
        """Running responses that are being prefilled."""
        return self._plan.prefilling

    @property
    def in_flight(self) -> bool:
        """Whether the device may still run a launch."""
        return bool(self._pending)

    @property
    def unread(self) -> bool:
        """Whether there may be tokens that `step` has not returned: of launches in flight, or of finished ones."""
        return bool(self._pending or self._ready)

    @property
    def launched(self) -> list[tuple[tuple[int, int, bool], int]]:
        """For the launches in flight, the shapes of their steps as in `last_step`, and the number of such steps."""
        out: list[tuple[tuple[int, int, bool], int]] = []
        for work in (p.work for p in self._pending):
            if work.prefill and work.steps > 1:  # the prefill comes with the first step
                out += [(work.shape, 1), ((len(work.rows), work.shape[1], False), work.steps - 1)]
            else:
                out.append((work.shape, max(1, work.steps)))
        return out

    def prefill_alone(self, alone: bool) -> None:
        """Whether a launch with a prefill has only one decode step: its tokens come sooner. The default with `kv`."""
        self._plan.single_step_with_prefill = alone

    def step(
        self, most_rows: int | None = None, most_steps: int | None = None, prefill: bool = True
    ) -> list[Chunk]:  # fmt: skip
        """Launch at most `most_steps` decode steps, of at most `most_rows` rows each, prefill included. 0 rows: launch
        nothing, and return the tokens of the oldest launch in flight. `prefill`: whether prompts may be computed."""
        self.last_step, self.last_steps, self.device_s = (0, 0, False), 1, None
        may_launch = most_rows != 0 and len(self._pending) < self.depth
        launched = may_launch and self._launch(most_rows, most_steps, prefill)
        if self._ready:
            self._ready_finished -= sum(c.finish is not None for c in self._ready[0])
            return self._ready.popleft()
        if self._pending and (not launched or len(self._pending) >= self.depth):
            return self._collect(self._pending.popleft())
        limited = most_rows is not None or self.kv is not None
        assert launched or limited or not self._sequences, "there is work, but nothing was launched"
        return []

    def finish_launches(self) -> None:
        """Wait until the device has run all launches. The next steps return their tokens."""
        self._finish_pending()

    def swap(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Use `weights` from now on (None: the shared model was changed in place). Running responses keep their tokens
        and are prefilled again with the new weights; no cached page of the old version is reused."""
        self._finish_pending()
        if weights is not None:
            copy_weights(self.model, version, weights)
        if self._device.decoder.stale():
            self._device.set_decoder(Decoder.of(self.model, self._device.decoder.ops))
        self.version = version
        self._plan.restart_all()

    def sleep(self) -> None:
        """Free the memory of the KV pool until the next step that has work."""
        if not self.asleep:
            self._finish_pending()
            self._plan.restart_all()
            self._device.pool.free()

    def wake(self) -> None:
        self._device.pool.allocate()

    def warm(self, *sizes: int, longest: int | None = None, shorter: bool = False) -> None:
        """Compile the kernels and capture the graphs for these numbers of responses, of up to `longest` tokens.
        `shorter`: also for shorter contexts, so that no step has to capture one."""
        slots = self._plan.host_state.slots
        self.wake()
        batches = sorted({batch_for(min(size, slots)) for size in sizes or (slots,)})
        self._device.warm(batches, min(longest or self.limit, self.limit), shorter=shorter)

    def warm_sizes(self, longest: int) -> None:
        """Capture graphs for a few batch sizes and all contexts up to `longest`, and use only these from now on: no
        step has to capture one, unless a response uses top-k or top-p."""
        slots = self._plan.host_state.slots
        sizes = [2**n for n in range(slots.bit_length()) if 2**n < slots]
        batches = self._device.batches = sorted({batch_for(size) for size in [*sizes, slots * 3 // 4, slots] if size})
        self._device.warm(batches, min(longest, self.limit), shorter=True)

    def _launch(self, most_rows: int | None, most_steps: int | None, prefill: bool) -> bool:
        if not self._sequences:
            return False
        if self.asleep:
            self.wake()
        work = self._plan.next(
            in_flight=bool(self._pending), most_rows=most_rows, most_steps=most_steps, may_prefill=prefill
        )
        if self.kv is not None:
            self.kv.clear_moved()  # on the stream of all launches: those in flight have written what they had to
        if work is None:
            return False
        self._pending.append(self._device.launch(work, self.version))
        self._steps += work.steps + bool(work.prefill)
        prefilled = sum(p.stop - p.start for p in work.prefill)
        self._rows += prefilled
        self._prefilled += prefilled
        return True

    def _finish_pending(self) -> None:
        """Wait for all launches in flight and keep their chunks for the next steps."""
        while self._pending:
            chunks = self._collect(self._pending.popleft())
            if chunks:
                self._ready.append(chunks)
                self._ready_finished += sum(c.finish is not None for c in chunks)

    def _collect(self, pending: PendingLaunch) -> list[Chunk]:
        """The tokens of a launch, as one chunk for every response that got any."""
        tokens, logprobs = pending.wait()
        self.device_s = pending.device_s()
        work, out = pending.work, []
        if work.prefill and work.steps > 1:
            self.last_step = (0, 0, False)  # of different shapes
        else:
            self.last_step, self.last_steps = work.shape, max(1, work.steps)
        sampled = [p.sequence for p in work.prefill if p.samples]
        prefilled = dict(zip(sampled, zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True), strict=False))
        steps = tokens[1:, : len(work.rows)]
        counts = (steps >= 0).sum(0)
        columns = zip(work.rows, counts.tolist(), steps.T.tolist(), logprobs[1:].T.tolist(), strict=False)
        for sequence, count, new_tokens, new_logprobs in columns:
            first = prefilled.pop(sequence, None)
            if sequence.finished or not (count or first):
                continue
            self._rows += count
            if count < len(new_tokens):
                new_tokens, new_logprobs = new_tokens[:count], new_logprobs[:count]
            if first:
                new_tokens, new_logprobs = [first[0], *new_tokens], [first[1], *new_logprobs]
            out.append(self._append(sequence, new_tokens, new_logprobs, pending.version))
        for sequence, first in prefilled.items():  # a response with max_tokens 1 has no row in the burst
            if not sequence.finished:
                out.append(self._append(sequence, [first[0]], [first[1]], pending.version))
        return out

    def _append(self, s: DeviceSequence, tokens: list[int], logprobs: list[float], version: int) -> Chunk:
        request, position = s.request, s.request.position + s.generated
        if len(request.stop) > STOPS:  # more than the device checks
            end = next((n + 1 for n, t in enumerate(tokens) if t in request.stop), len(tokens))
            tokens, logprobs = tokens[:end], logprobs[:end]
        s.tokens += tokens
        s.generated += len(tokens)
        self._generated += len(tokens)
        finish: Finish | None = None
        if tokens[-1] in request.stop:
            finish = "stop"
        elif s.generated == request.max_tokens:
            finish = "length"
        if finish:
            del self._sequences[request.id]
            self._plan.remove(s, ended=True)
        return Chunk(
            id=request.id, position=position, tokens=tuple(tokens), logprobs=tuple(logprobs), version=version,
            finish=finish,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping of pages, slots or sequences is inconsistent."""
        self._plan.check()
        assert len(self._pending) <= DEPTH, "too many launches in flight"
        live = {id(s) for s in [*self._plan.running, *self._plan.waiting]}
        assert live == {id(s) for s in self._sequences.values()}, "sequences and plan disagree"
        assert not any(s.finished for s in self._sequences.values()), "a finished sequence was not removed"
