"""Common parts of the GPU engine's tests: models on a device, their oracle, and which results count as equal.

The oracle is transformers in float32 on the CPU with the same (rounded) weights. `CLOSE` limits the difference of
log-probs and logits; tokens must be equal on the CPU, and on a GPU up to ties within that limit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.support.engines import reference_kernels  # noqa: F401  # GraphEngine also runs on a CPU
from tests.support.engines.small_models import MODELS, SHAPE, build, logprobs, tokens
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.splits import PrefixSharing
from windfall.engine.torch import sampler
from windfall.types import Chunk, Request

MORE: dict[str, Any] = {
    # biases, and a window in the upper layers only
    "qwen2-bias": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **SHAPE, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=24,
            max_window_layers=1, tie_word_embeddings=True,
        )
    ),
    # every bias there is, and stretched positions
    "llama3-rope": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SHAPE, num_attention_heads=3, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
            rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
        )
    ),
}  # fmt: skip
CLOSE = {("cpu", torch.float32): 1e-4, ("cuda", torch.float32): 2e-3, ("cuda", torch.bfloat16): 0.3}
EAGER, NEVER = PrefixSharing(max_rows=8, min_tokens=8, min_saved_tokens=1), PrefixSharing(max_rows=0)
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def cases(names: Iterable[str]) -> list[Any]:
    return [
        pytest.param(
            (name, device, dtype), id=f"{name}-{device}-{str(dtype)[6:]}", marks=NO_GPU if device == "cuda" else ()
        )
        for name in names
        for device, dtype in CLOSE
    ]


class Case:
    """A model on a device in a dtype, and the oracle with the same weights."""

    def __init__(self, name: str, device: str, dtype: torch.dtype) -> None:
        torch.set_num_threads(1)
        if name in MODELS:
            made = build(name)
        else:
            torch.manual_seed(5)
            made = MORE[name]().eval()
            with torch.no_grad():
                for n, p in made.named_parameters():
                    if n.endswith("bias"):
                        p.normal_(std=0.2)
        self.model = made.to(dtype)
        self.plain = copy.deepcopy(self.model).float()
        self.model.to(device)
        self.exact, self.close = device == "cpu", CLOSE[device, dtype]

    def engine(self, **options: Any) -> GraphEngine:
        return graph_engine(self.model, **options)

    @torch.no_grad()
    def logits(self, request: Request, said: list[int]) -> torch.Tensor:
        return self.plain(torch.tensor([[*request.prompt, *said]])).logits[0, len(request.prompt) - 1 : -1]

    def same(self, request: Request, one: Iterable[Chunk], two: Iterable[Chunk], plain: Any = None) -> None:
        """Assert that both results are equal. On a GPU they may differ from a tie on: there, each result must have a
        token that the oracle (`plain` or the case's own) would sample with almost the same random number."""
        a, b = tokens(one), tokens(two)
        assert len(a) == len(b) or request.stop
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert logprobs(one)[:n] == pytest.approx(logprobs(two)[:n], abs=2 * self.close)
        if a == b:
            return
        assert not self.exact
        assert n < min(len(a), len(b))
        with torch.no_grad():
            logits = (plain or self.plain)(torch.tensor([[*request.prompt, *a[:n]]])).logits[0, -1].float()
        for token in (a[n], b[n]):
            self._next_to_drawn(request, logits, n, token)

    def _next_to_drawn(self, request: Request, logits: torch.Tensor, n: int, token: int) -> None:
        how = request.sampling
        if how.temperature == 0:
            assert logits[token] >= logits.max() - 2 * self.close
            return
        logp = torch.log_softmax(logits / how.temperature, -1)[None]
        kept = sampler.truncated_probs(logp, torch.tensor([how.top_k]), torch.tensor([how.top_p]))[0].double()
        upto = (kept / kept.sum()).cumsum(0)
        drawn = float(sampler.uniform([request.seed], [request.position + n])[0])
        low, high = float(upto[token - 1]) if token else 0.0, float(upto[token])
        assert low - self.close / 2 <= drawn <= high + self.close / 2


def graph_engine(model: Any, **options: Any) -> GraphEngine:
    return GraphEngine(model, **{"kv_tokens": 4096, "max_running": 16, "max_rows": 64, "sharing": EAGER, **options})
