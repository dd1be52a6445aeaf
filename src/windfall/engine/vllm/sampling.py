"""windfall's sampling inside vLLM's model runner, and the sampling parameters of a request.

vLLM has two model runners, and chooses one by model, version and device:

- V2 draws Gumbel noise by (seed, absolute position, token id). It has no state, so a response continues exactly
  wherever it is resumed with its seed. Its sampler is used as it is.
- V1 has a random generator for every seeded request: a continued request would restart its stream. On a CPU, a
  seeded request that is prefilled in chunks crashes the process (a generator there has no offset to set back).
  Therefore `WindfallSampler` replaces V1's sampler: a token is a function of (seed, position, logits), the same one as
  in windfall's engines, so a response may move between those and this one.

`WindfallSampler` also makes log-probs cheaper. vLLM computes the rank of the sampled token and gathers the top k; on a
GPU, two kernels of windfall's own engine read the logits once and give the token and the one number that is wanted.
Requests reach V1 with temperature 0, so vLLM's own sampler would return greedy tokens for them: it gets only the dummy
batches of vLLM's warm-up, and a batch whose rows cannot be matched with windfall's requests is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.engine.cuda import sampling as torch_sampling
from windfall.engine.cuda.state import DeviceState
from windfall.errors import WindfallError
from windfall.types import Request, Sampling

KEY = "windfall"
"""Key of a request's (seed, position of its first new token, length of its prompt, Sampling) in `extra_args`."""

MIN_TEMPERATURE = 0.01
"""vLLM raises a lower temperature to this one, unless it is 0."""
ALWAYS = 1 << 30
"""Tokens left in every row: vLLM decides when a response ends."""
NO_DRAFTS = "it accepts drafts by rejection sampling, so the drafts would change which tokens are sampled"
"""Why vLLM's own speculation is never turned on (both model runners verify like this)."""
OTHER_WAYS = "use engine.name = 'windfall', or set VLLM_USE_V2_MODEL_RUNNER=0 for this worker."


def sampling_params(request: Request, *, own: bool, experts: bool = False) -> Any:
    """vLLM's parameters for a request. `own`: WindfallSampler draws the tokens, not vLLM. `experts`: vLLM returns the
    chosen experts of the tokens."""
    from vllm import SamplingParams  # pyright: ignore
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore

    common: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "stop_token_ids": sorted(request.stop),
        "ignore_eos": True,
        "detokenize": False,
        "logprobs": 0,
        "output_kind": RequestOutputKind.DELTA,
        **({"routed_experts_prompt_start": request.experts_known} if experts else {}),
    }
    if own:
        s = request.sampling
        facts = (request.seed, request.position, len(request.prompt), (s.temperature, s.top_p, s.top_k))
        return SamplingParams(**common, temperature=0.0, extra_args={KEY: facts})
    # vLLM takes a signed seed, in which -1 means none.
    return SamplingParams(**common, temperature=request.sampling.temperature, seed=request.seed & (2**63 - 1))


def check_sampling(s: Sampling, *, own: bool, where: str) -> None:
    """Raise WindfallError if vLLM's tokens or log-probs would not be windfall's. `own`: see `sampling_params`."""
    if own:
        return
    if s.top_p < 1.0 or s.top_k > 0:
        raise WindfallError(
            f"vLLM's model runner V2 reports log-probs after top-p and top-k cuts, windfall needs those before: "
            f"top_p is {s.top_p:g}, top_k is {s.top_k}",
            where=where,
            fix=f"Set rollout.top_p = 1 and rollout.top_k = 0, {OTHER_WAYS}",
        )
    if 0 < s.temperature < MIN_TEMPERATURE:
        raise WindfallError(
            f"vLLM would sample with temperature {MIN_TEMPERATURE:g} instead of {s.temperature:g}",
            where=where,
            fix=f"Set the temperature to 0 (greedy) or to {MIN_TEMPERATURE:g} or more, {OTHER_WAYS}",
        )


class WindfallSampler(torch.nn.Module):
    """Has the interface of `vllm.v1.sample.sampler.Sampler`, as far as the V1 runner uses it here."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._vllm = runner.sampler  # for the dummy batches of vLLM's warm-up
        self._runner = runner
        self._ids: list[str] = []
        self._offsets = np.zeros(0, np.int64)
        """What to add to a row's number of tokens to get the position of its next token in the response."""
        self._rows: RowSampler | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_vllm"), name)

    def forward(self, logits: torch.Tensor, sampling_metadata: Any, **options: Any) -> Any:
        batch, rows = self._runner.input_batch, logits.shape[0]
        if batch.req_ids != self._ids:
            self._read_rows(batch.req_ids, logits.device)
        if not self._ids:
            return self._vllm(logits=logits, sampling_metadata=sampling_metadata, **options)
        if rows != len(self._ids) or sampling_metadata is not batch.sampling_metadata:
            raise RuntimeError(
                f"vLLM samples {rows} rows while its batch has {len(self._ids)} of windfall's responses, or with other "
                "parameters than those of the batch: their tokens would be greedy ones. Set engine.name = 'windfall'."
            )
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput  # pyright: ignore

        lengths = self._runner.optimistic_seq_lens_cpu[:rows].numpy()
        # A row in the middle of its prefill also samples; vLLM drops that token. Its position may be negative.
        positions = np.maximum(0, lengths + self._offsets)
        assert self._rows is not None
        tokens, logprobs = self._rows.sample(logits, positions)
        tokens = tokens[:, None]
        ranks = tokens[:, 0]  # nothing reads them
        found = LogprobsTensors(tokens, logprobs[:, None], ranks)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=found)

    def _read_rows(self, ids: Sequence[str], device: torch.device) -> None:
        """Read the parameters of these requests. In a dummy batch none is windfall's, so no row is kept."""
        requests = self._runner.requests
        found = [(requests[id].sampling_params.extra_args or {}).get(KEY) for id in ids if id in requests]
        facts = [fact for fact in found if fact is not None]
        if facts and len(facts) < len(ids):
            raise RuntimeError(f"{len(ids) - len(facts)} of {len(ids)} requests in vLLM's batch are not windfall's")
        self._ids = list(ids) if facts else []
        self._offsets = np.array([position - prompt for _, position, prompt, _ in facts], np.int64)
        if facts:
            self._rows = self._rows or RowSampler(device)
            samplings = [Sampling(temperature=t, top_p=p, top_k=k) for _, _, _, (t, p, k) in facts]
            self._rows.set_rows([seed for seed, _, _, _ in facts], samplings)


class RowSampler:
    """The GPU engine's sampling for the rows of another engine's batch. That engine has the logits; it says which
    response each row belongs to when its batch changes, and at which position each row is in every step. Tokens and
    log-probs stay on the device, and the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._state = DeviceState.new(0, 1, str(device))
        self._rows = torch.zeros(0, dtype=torch.int32, device=device)
        self._truncate = False
        self._sample = torch_sampling.sample
        if self._on_gpu:
            from windfall.engine.cuda.kernels import sampling

            self._sample = sampling.sample

    def set_rows(self, seeds: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Row n of the next batches has seed n and sampling n."""
        count = len(seeds)
        if count > len(self._rows):
            self._state = DeviceState.new(2 * count, 1, str(self._device))
            self._rows = torch.arange(2 * count, dtype=torch.int32, device=self._device)
        s = self._state
        bits = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64).view(np.int64)
        self._copy(s.seed, bits)
        self._copy(s.temperature, np.array([x.temperature for x in samplings], np.float32))
        self._copy(s.top_k, np.array([x.top_k for x in samplings], np.int32))
        self._copy(s.top_p, np.array([x.top_p for x in samplings], np.float32))
        s.left[:count] = ALWAYS
        self._truncate = any(x.top_k > 0 or x.top_p < 1.0 for x in samplings)

    def sample(self, logits: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens (int32) and their log-probs, one per row. `positions`: of each row's next token in its response."""
        count = len(positions)
        self._copy(self._state.position, positions.astype(np.int32))
        tokens = torch.empty(count, dtype=torch.int32, device=self._device)
        logprobs = torch.empty(count, dtype=torch.float32, device=self._device)
        self._sample(logits, self._rows[:count], self._state, tokens, logprobs, self._truncate)
        return tokens, logprobs

    def _copy(self, to: Tensor, values: np.ndarray) -> None:
        host = torch.from_numpy(values)
        to[: len(values)].copy_(host.pin_memory() if self._on_gpu else host, non_blocking=True)
