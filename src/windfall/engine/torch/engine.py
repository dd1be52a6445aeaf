"""The engine: requests in, a stream of tokens out.

    engine.add(request)        at any time between two steps
    chunks = engine.step()     one model step: at most one new token for every running response
    engine.cancel(id)          frees its pages at once; no more chunks are returned for it
    engine.swap(version, ...)  sets new weights between two steps; running responses continue with them
    engine.sleep()             frees the memory of the KV cache until the next step that has work
    engine.forget(session)     drops the pages that are kept for the next turn of this session

The engine owns the page pool and the scheduler; it shares the model with its creator. It never waits and starts no
thread: that is left to the worker around it. It reads the clock only to decide which kept pages to drop first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windfall.engine.base import Counters
from windfall.engine.pages import Pages
from windfall.engine.retention import Retention
from windfall.engine.scheduler import Scheduler, Sequence
from windfall.errors import WindfallError
from windfall.types import Capabilities, Chunk, Finish, Request

if TYPE_CHECKING:
    from windfall.engine.torch.arena import TenantKV


class TorchEngine:
    capabilities = Capabilities(name="torch")
    burst, depth, last_steps, in_flight, unread, launched, device_s = 1, 1, 1, False, False, (), None
    """Like GraphEngine's: every step is one launch, which is waited for."""

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
        keep_share: float = 0.5,
        kv: TenantKV | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep_share`: share of the KV cache for sessions whose environment works. `kv`: pages in memory that another
        engine shares; then `kv_tokens` and `page_size` do not count."""
        from windfall.engine.torch.runner import Runner  # imports transformers, which GraphEngine does not use

        pages = Pages(-(-kv_tokens // page_size), page_size) if kv is None else kv.pages
        count = pages.capacity
        self.model, self.version, self.kv = model, version, kv
        self.limit = count * pages.size - 1  # the newest token needs no page yet, but the next one would
        retention = Retention(pages, share=keep_share, clock=clock)
        self._scheduler = Scheduler(pages, max_running=max_running, max_rows=max_rows, retention=retention)
        self._runner = Runner(model, pages=count, page_size=pages.size, deterministic=deterministic, kv=kv)
        self._sequences: dict[str, Sequence] = {}
        self.last_step = (0, 0, False)
        """Rows of the last step, the tokens that they attended to, and whether it had a prefill."""
        self._steps = self._rows = self._generated = self._prefilled = 0
        self.take_dropped = retention.take_dropped
        self.forget = retention.forget
        self.evict_kept = retention.evict

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def counters(self) -> Counters:
        s = self._scheduler
        return Counters(
            steps=self._steps, rows=self._rows, generated=self._generated,
            reused_tokens=s.reused_tokens, preemptions=s.preemptions, waiting=len(s.waiting), lookups=s.lookups,
            hits=s.hits, prefilled=self._prefilled, kept_sessions=len(s.retention),
            kept_tokens=s.retention.page_count * s.pages.size,
        )  # fmt: skip

    def add(self, request: Request) -> None:
        if request.id in self._sequences:
            raise WindfallError("this id is already being generated", where=f"request {request.id}")
        check_request(request, self.model.get_input_embeddings().num_embeddings, self.limit)
        sequence = Sequence(request, list(request.prompt))
        self._sequences[request.id] = sequence
        self._scheduler.add(sequence)

    def cancel(self, id: str) -> None:
        """Stop this response. An unknown id is not an error: the response may just have finished."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    @property
    def sequences(self) -> list[Sequence]:
        """All responses in the order in which they are computed. For reading only."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    @property
    def prefill_rows(self) -> int:
        """Rows that are still to be prefilled, beside one for every running response."""
        return sum(len(s.tokens) - s.computed for s in self.sequences) - len(self._scheduler.running)

    @property
    def prefilling(self) -> int:
        """Running responses that are being prefilled."""
        return sum(len(s.tokens) - s.computed > 1 for s in self._scheduler.running)

    def step(
        self, most_rows: int | None = None, most_steps: int | None = None, prefill: bool = True
    ) -> list[Chunk]:  # fmt: skip
        """One step of at most `most_rows` rows. `prefill`: whether prompts may be computed."""
        del most_steps
        rows = self._scheduler.plan(most_rows, prefill=prefill)
        counts = [r.stop - r.start for r in rows]
        self.last_step = (sum(counts), sum(r.stop for r in rows), max(counts, default=0) > 1)
        if not rows:
            return []
        self._runner.allocate()
        new = self._runner.run(rows)
        self._scheduler.complete(rows)
        self._steps += 1
        self._rows += self.last_step[0]
        self._prefilled += sum(r.stop - r.start for r in rows if r.stop - r.start > 1 or not r.sequence.generated)
        self._generated += len(new)
        sampling = [r.sequence for r in rows if r.samples]
        return [self._append(s, t, lp) for s, (t, lp) in zip(sampling, new, strict=True)]

    def _append(self, sequence: Sequence, token: int, logprob: float) -> Chunk:
        request, position = sequence.request, sequence.position
        sequence.tokens.append(token)
        sequence.generated += 1
        finish: Finish | None = "length" if sequence.generated == request.max_tokens else None
        if token in request.stop:
            finish = "stop"
        if finish:
            del self._sequences[request.id]
            self._scheduler.remove(sequence, finished=True)
        return Chunk(
            id=request.id, position=position, tokens=(token,), logprobs=(logprob,), version=self.version, finish=finish
        )

    def swap(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Use `weights` from now on (None: the shared model was changed in place). Running responses keep their tokens
        and are prefilled again with the new weights; no cached page of the old version is reused."""
        if weights is not None:
            copy_weights(self.model, version, weights)
        self.version = version
        self._scheduler.restart_all()

    @property
    def asleep(self) -> bool:
        return self._runner.pools is None

    def sleep(self) -> None:
        """Free the memory of the KV cache until the next step that has work. Responses keep their tokens, and are
        prefilled again."""
        if not self.asleep:
            self._scheduler.restart_all()
            self._runner.free()

    def finish_launches(self) -> None:
        """Nothing is ever in flight."""

    def prefill_alone(self, alone: bool) -> None:
        """Every launch is one step."""

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping of pages or sequences is inconsistent."""
        self._scheduler.check()
        live = {id(s) for s in [*self._scheduler.running, *self._scheduler.waiting]}
        assert live == {id(s) for s in self._sequences.values()}, "sequences and schedule disagree"


def check_request(request: Request, vocabulary: int, limit: int) -> None:
    """Raise WindfallError for a request that is invalid or that does not fit into an engine of this size."""
    where = f"request {request.id}"
    if not request.prompt or min(request.prompt) < 0 or max(request.prompt) >= vocabulary:
        raise WindfallError(f"the prompt must be 1 or more token ids below {vocabulary}", where=where)
    if request.max_tokens < 1 or request.position < 0:
        raise WindfallError("max_tokens must be at least 1 and position at least 0", where=where)
    s = request.sampling
    if not (s.temperature >= 0 and 0 < s.top_p <= 1 and s.top_k >= 0):
        raise WindfallError(f"needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0, but got {s}", where=where)
    if len(request.prompt) + request.max_tokens > limit:
        need = f"{len(request.prompt)} prompt tokens + {request.max_tokens} new tokens"
        fix = "Raise engine.kv_tokens, or lower rollout.max_tokens."
        raise WindfallError(f"{need} do not fit into a KV cache of {limit} tokens", where=where, fix=fix)


@torch.no_grad()
def copy_weights(model: Any, version: int, weights: Mapping[str, Tensor]) -> None:
    """Copy all weights into the module's own storage, or none of them if any does not fit. Weights that are computed
    (weights/merged.py) are never all in memory: they have `shape`, and `copy_into`, which writes one of them."""
    own = model.state_dict()
    unknown, missing = weights.keys() - own.keys(), own.keys() - weights.keys()
    tied = {n for n in missing if any(own[n].data_ptr() == own[w].data_ptr() for w in weights if w in own)}
    if unknown or missing - tied:
        names, how = sorted(unknown or missing - tied), "unknown" if unknown else "missing"
        what = f"{len(names)} tensors such as {names[0]!r} are {how}"
        raise WindfallError(f"version {version} does not fit the model: {what}")
    shape = getattr(weights, "shape", lambda name: weights[name].shape)
    copy_into = getattr(weights, "copy_into", lambda name, target: target.copy_(weights[name]))
    wrong = [n for n in weights if shape(n) != own[n].shape]
    if wrong:
        raise WindfallError(f"version {version} does not fit the model: {wrong[0]!r} has the wrong shape")
    for name in weights:
        copy_into(name, own[name])
