"""vLLM engines for tests, one for each model, and the models: shapes that vLLM's attention on a CPU can run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from windfall.engine.vllm import factory as vllm_factory
from windfall.link.messages import EngineSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 2e-3 if DEVICE == "cuda" else 1e-4
"""Largest accepted difference of log-probs from transformers in float32."""
SHAPE: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=64, tie_word_embeddings=False)),
    "mistral-window": lambda: MistralForCausalLM(
        MistralConfig(**SHAPE, sliding_window=32, tie_word_embeddings=False)
    ),
    # a dense layer between two with 4 experts, 2 of them for each token
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **(SHAPE | {"num_hidden_layers": 3}), head_dim=32, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, mlp_only_layers=[1], norm_topk_prob=True, tie_word_embeddings=False,
        )
    ),
    # windows in every other layer, norms around every block, scaled embeddings
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE, head_dim=32, sliding_window=32, query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"],
        )
    ),
    # joined projections
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, tie_word_embeddings=False)),
}  # fmt: skip
SIZES: dict[str, Any] = {"kv_tokens": 4096, "page_size": 16, "max_running": 16, "max_rows": 64}


def build(name: str) -> Any:
    torch.manual_seed(5)
    return MODELS[name]().eval()


def versions(name: str, count: int) -> list[Any]:
    """`count` models that differ in their weights."""
    out = [build(name)]
    for seed in range(1, count):
        out.append(copy.deepcopy(out[-1]))
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in out[-1].parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=noise))
    return out


def spec_of(model: Any, **options: Any) -> EngineSpec:
    return EngineSpec(
        model_config=model.config.to_json_string(use_diff=False), dtype="float32", deterministic=False, longest=200,
        wanted=64, **{**SIZES, **options},
    )  # fmt: skip


_engines: dict[str, Any] = {}


def engine(model: Any, *, version: int = 0, own_sampler: bool = True, **options: Any) -> Any:
    """An idle engine with the weights of this model. Engines of the same shape are used again."""
    spec = spec_of(model, **options)
    key = f"{spec!r} {own_sampler}"
    if key not in _engines:
        close_all()
        _engines[key] = vllm_factory.build(spec, DEVICE, own_sampler=own_sampler, eager=True)[0]
    e = _engines[key]
    for id in list(e._ids):
        e.cancel(id)
    e.swap(version, model.state_dict())
    return e


def close_all() -> None:
    for key in list(_engines):
        _engines.pop(key).close()


def fields_of(model: Any) -> dict[str, Any]:
    return json.loads(model.config.to_json_string(use_diff=False))
