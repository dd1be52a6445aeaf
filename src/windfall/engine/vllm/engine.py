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
- With adapters, each policy is one of vLLM's own adapters (adapters.py), or the base. A swap of one policy aborts its
  running responses and adds them again with their tokens; nothing else is touched. vLLM's prefix cache is by name of
  the adapter, and every version has a name of its own.
- The ranks are processes that end with this one, however it ends (extension.py).
- In a model with experts, vLLM returns with the tokens of a step the experts of all tokens before the last one that it
  has not returned yet (`enable_return_routed_experts`): with the first ones those of the prompt.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from windfall.engine.base import Counters, Engine, check_policy, check_request, duplicate_id
from windfall.engine.held_policies import AdapterRoom
from windfall.engine.vllm import installed, sampling
from windfall.engine.vllm.adapters import AdapterFolders
from windfall.engine.vllm.checkpoint import WeightShapes
from windfall.models.experts import dtype_of, largest
from windfall.types import Capabilities, Chunk, Finish, Request, Sampling
from windfall.weights.merged import MergedWeights
from windfall.weights.shared import BufferTensors, SharedTensors, TensorFile


@dataclass(slots=True)
class _Running:
    request: Request
    generated: int = 0
    tokens: list[int] = field(default_factory=list)  # those generated, if a swap may add the response again


class VllmEngine(Engine):
    def __init__(
        self,
        vllm: Any,
        shapes: WeightShapes,
        *,
        version: int,
        own_sampler: bool,
        tensor_parallel: int,
        adapters: int = 0,
        adapter_rank: int = 0,
        experts: bool = False,
    ) -> None:
        """`vllm`: an `LLMEngine` of vllm/factory.py. The weights are unset until the first swap. `own_sampler`: use
        windfall's sampler where vLLM's is not exact. `adapters`, `adapter_rank`: as in EngineSpec. `experts`: vLLM
        returns the experts of the tokens."""
        self.versions = {} if adapters else {"": version}
        self._room = AdapterRoom(adapters, adapter_rank)
        self._folders = AdapterFolders() if adapters else None
        self.shapes = shapes
        self._vllm = vllm
        self._core = vllm.engine_core
        facts = vllm.collective_rpc("windfall_prepare", args=(os.getpid(), own_sampler))
        self.rank_pids = [f["pid"] for f in facts]
        self._own = bool(facts[0]["own_sampler"])
        found = installed.find()
        assert found is not None
        self.capabilities = Capabilities(
            name="vllm",
            version=found.version,
            exact=self._own or bool(facts[0]["v2"]),
            tensor_parallel=tensor_parallel,
            adapters=adapters,
            experts=experts,
        )
        self._expert_layers = [layer.index for layer in shapes.experts]
        self._expert_dtype = dtype_of(largest(shapes.experts)) if experts else None
        self.limit = int(vllm.vllm_config.model_config.max_model_len)
        self._seeded = self._own or not found.for_cpu  # see sampling.py
        self._running: dict[str, _Running] = {}
        """By vLLM's id. An id of windfall's may be added again after a cancel, while vLLM still knows the old one."""
        self._ids: dict[str, str] = {}
        """From windfall's id to vLLM's."""
        self._numbers = itertools.count()
        self._counters = Counters()

    @property
    def version(self) -> int:
        return self.versions.get("", 0)

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
        check_policy(request, self.versions)
        self.check_sampling(request.sampling, where=f"request {request.id}")
        self._begin(request)

    def _begin(self, request: Request) -> None:
        params = sampling.sampling_params(request, own=self._own, experts=self.capabilities.experts)
        if not self._seeded:
            params.seed = None
        id = f"{request.id}-{next(self._numbers)}"
        adapter = None if self._folders is None else self._folders.requests.get(request.policy)
        self._core.add_request(_core_request(id, request, params, adapter))
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
        if self._folders is not None:
            state.tokens += tokens
        self._counters.generated += len(tokens)
        logprobs = output.new_logprobs.logprobs
        chosen: dict[str, Any] = {}
        if self._expert_dtype is not None and output.routed_experts is not None:
            rows = output.routed_experts[:, self._expert_layers].astype(self._expert_dtype)
            chosen = {"experts": rows.tobytes(), "expert_tokens": len(rows)}
        return Chunk(
            id=state.request.id,
            position=position,
            tokens=tuple(tokens),
            version=self.versions[state.request.policy],
            finish=finish,
            logprobs=tuple(logprobs[:, 0].tolist()) if len(tokens) > 1 else (float(logprobs[0, 0]),),
            **chosen,
        )

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        if self._folders is not None:
            self._swap_adapter(self._folders, version, weights, policy)
            return
        versions = self._room.swapped(self.versions, policy, version, weights, busy=bool(self._ids))
        self._load_all(version, weights)
        self.versions = versions

    def _load_all(self, version: int, weights: Mapping[str, Any] | None) -> None:
        if weights is not None:
            self.shapes.check(version, weights)
            self._load(version, weights)
        self._core.reset_prefix_cache(reset_running_requests=True)

    def _swap_adapter(
        self, folders: AdapterFolders, version: int, weights: Mapping[str, Any] | None, policy: str
    ) -> None:
        given = None if weights is None else MergedWeights.of(weights)
        versions = self._room.swapped(self.versions, policy, version, given, busy=bool(self._ids))
        if given is not None:
            if not given.base_is_loaded:
                self.shapes.check(version, given.base)
            folders.replace(self._vllm, policy, given, versions)
            if not given.base_is_loaded:
                self._load_all(version, given.base)
        self.versions = versions
        self._restart(policy)
        folders.forget_old(self._vllm)

    def _restart(self, policy: str) -> None:
        """Add the running responses of this policy again, with the tokens that they have."""
        restarted = {id: s for id, s in self._running.items() if s.request.policy == policy}
        self._core.abort_requests(list(restarted))
        for id, s in restarted.items():
            del self._running[id]
            r, count = s.request, s.generated
            # Where vLLM draws by its own state, the first numbers of this seed were used already.
            seed = r.seed if self.capabilities.exact else r.seed + count
            prompt, left = (*r.prompt, *s.tokens), r.max_tokens - count
            known = len(prompt) - 1 if count else r.experts_known
            how = {"max_tokens": left, "seed": seed, "experts_known": known}
            self._begin(replace(r, prompt=prompt, position=r.position + count, **how))

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
        if self._folders is not None:
            self._folders.close()


def _core_request(id: str, request: Request, params: Any, adapter: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequest  # pyright: ignore

    return EngineCoreRequest(
        request_id=id,
        prompt_token_ids=list(request.prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=id,
    )


def _finish(output: Any, request: Request) -> Finish:
    reason = str(output.finish_reason)
    if reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {request.id} with {reason!r}")
    return "stop" if reason == "stop" else "length"
