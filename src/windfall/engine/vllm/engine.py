"""vLLM behind windfall's engine interface: `vllm.LLMEngine` in this process, with a step loop of its own.

    add ──▶ EngineCoreRequest ──▶ vLLM's engine core ──▶ EngineCoreOutput ──▶ Chunk
                                  scheduler, KV cache, model runner (1 rank: in this process; N ranks: N children)

Why not `LLMEngine.add_request` and `LLMEngine.step`: they add a detokenizer, objects for every token and statistics,
which windfall does not need. With 256 responses they take about as long as the GPU; log-probs make a dictionary for
each token. `LLMEngine` builds everything; requests then go directly to its engine core, which returns token ids as
lists and log-probs as arrays (docs/vllm.md has the figures).

Rules:
- A chunk has the tokens of one step, in order, each with its log-prob under softmax(logits / temperature). sampling.py
  explains how tokens are drawn, and when a response continues exactly (`capabilities.exact`).
- `swap` loads the weights between two steps, then empties the prefix cache and sends every running response back to the
  waiting queue: it keeps its tokens and is prefilled again. With asynchronous scheduling a batch may be in flight;
  vLLM drops its tokens, so no token of the old weights comes after the swap.
- A response ends with a stop token or after `max_tokens` tokens, as in every engine. `limit` keeps requests away from
  vLLM's own limit on the length of a sequence.
- The engine refuses top-p and top-k where vLLM's log-probs would be those after the cut, and temperatures that vLLM
  would raise. A worker checks the run's parameters as soon as it has built its engine (vllm/factory.py) and is refused
  with the reason; otherwise `add` would reject one response after the other.
- The ranks are processes that end with this one, however it ends (extension.py).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from windfall.engine.base import Counters, Engine, check_request, duplicate_id
from windfall.engine.vllm import installed, sampling
from windfall.engine.vllm.checkpoint import WeightShapes
from windfall.types import Capabilities, Chunk, Finish, Request, Sampling
from windfall.weights.shared import BufferTensors, SharedTensors, TensorFile


@dataclass(slots=True)
class _Running:
    request: Request
    generated: int = 0


class VllmEngine(Engine):
    def __init__(
        self, vllm: Any, shapes: WeightShapes, *, version: int, own_sampler: bool, tensor_parallel: int
    ) -> None:
        """`vllm`: an `LLMEngine` of vllm/factory.py. The weights are unset until the first swap. `own_sampler`: use
        windfall's sampler where vLLM's is not exact."""
        self.version = version
        self.shapes = shapes
        self._vllm = vllm
        self._core = vllm.engine_core
        facts = vllm.collective_rpc("windfall_prepare", args=(os.getpid(), own_sampler))
        self.rank_pids = [f["pid"] for f in facts]
        self._own = bool(facts[0]["own_sampler"])
        found = installed.find()
        assert found is not None
        self.capabilities = Capabilities(
            name="vllm", version=found.version, exact=self._own or bool(facts[0]["v2"]), tensor_parallel=tensor_parallel
        )
        self.limit = int(vllm.vllm_config.model_config.max_model_len)
        self._seeded = self._own or not found.for_cpu  # see sampling.py
        self._running: dict[str, _Running] = {}
        """By vLLM's id. An id of windfall's may be added again after a cancel, while vLLM still knows the old one."""
        self._ids: dict[str, str] = {}
        """From windfall's id to vLLM's."""
        self._numbers = itertools.count()
        self._counters = Counters()

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def counters(self) -> Counters:
        counts = self._core.engine_core.scheduler.get_request_counts()
        return replace(self._counters, waiting=counts[1])

    def add(self, request: Request) -> None:
        if request.id in self._ids:
            raise duplicate_id(request)
        check_request(request, self.shapes.vocabulary, self.limit)
        self.check_sampling(request.sampling, where=f"request {request.id}")
        params = sampling.sampling_params(request, own=self._own)
        if not self._seeded:
            params.seed = None
        id = f"{request.id}-{next(self._numbers)}"
        self._core.add_request(_core_request(id, request, params))
        self._ids[request.id] = id
        self._running[id] = _Running(request)

    def check_sampling(self, wanted: Sampling, *, where: str) -> None:
        """Raise WindfallError if this engine cannot sample like this."""
        sampling.check_sampling(wanted, own=self._own, where=where)

    def cancel(self, id: str) -> None:
        known = self._ids.pop(id, None)
        if known is not None:
            del self._running[known]
            self._core.abort_requests([known])

    def step(self) -> list[Chunk]:
        """One step of vLLM's engine core. Returns nothing if the step only started a batch."""
        if not self._ids:
            return []
        outputs = self._core.get_output().outputs
        self._counters.steps += 1
        return [c for c in map(self._chunk, outputs) if c is not None]

    def _chunk(self, output: Any) -> Chunk | None:
        state = self._running.get(output.request_id)
        if output.prefill_stats is not None:
            self._counters.reused_tokens += output.prefill_stats.num_cached_tokens
        tokens = output.new_token_ids
        if state is None or (not tokens and output.finish_reason is None):
            return None
        finish: Finish | None = None
        if output.finish_reason is not None:
            finish = _finish(output, state.request)
            del self._running[output.request_id], self._ids[state.request.id]
        position = state.request.position + state.generated
        state.generated += len(tokens)
        self._counters.generated += len(tokens)
        logprobs = output.new_logprobs.logprobs
        return Chunk(
            id=state.request.id,
            position=position,
            tokens=tuple(tokens),
            version=self.version,
            finish=finish,
            logprobs=tuple(logprobs[:, 0].tolist()) if len(tokens) > 1 else (float(logprobs[0, 0]),),
        )

    def swap(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        if weights is not None:
            self.shapes.check(version, weights)
            self._load(version, weights)
        self.version = version
        self._core.reset_prefix_cache(reset_running_requests=True)

    def _load(self, version: int, weights: Mapping[str, Any]) -> None:
        owned: TensorFile | None = None
        source: SharedTensors | Mapping[str, Any] = weights
        if self.capabilities.tensor_parallel > 1:
            source = weights.shared if isinstance(weights, BufferTensors) else (owned := TensorFile(weights)).shared
        try:
            missing = self._vllm.collective_rpc("windfall_load", args=(source,))
        finally:
            if owned is not None:
                owned.close()
        if any(missing):
            names = next(filter(None, missing))
            raise RuntimeError(f"vLLM has {len(names)} weights that version {version} did not set, such as {names[0]}")

    def check(self) -> None:
        assert {s.request.id: id for id, s in self._running.items()} == self._ids, "ids and responses disagree"
        known = set(self._core.engine_core.scheduler.requests)
        assert set(self._running) <= known, "vLLM has lost a response"

    def close(self) -> None:
        """End the ranks and free the memory."""
        self._ids.clear()
        self._running.clear()
        self._core.shutdown()


def _core_request(id: str, request: Request, params: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest  # pyright: ignore

    return EngineCoreRequest(
        request_id=id,
        prompt_token_ids=list(request.prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=id,
    )


def _finish(output: Any, request: Request) -> Finish:
    reason = str(output.finish_reason)
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {request.id} with {reason!r}")
    return "stop" if reason == "stop" else "length"
