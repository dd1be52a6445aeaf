"""Small random models of the important shapes, and helpers to run an engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from windfall.engine.torch.engine import TorchEngine
from windfall.types import Chunk, Request, Sampling

VOCABULARY = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

MODELS: dict[str, Callable[[], Any]] = {
    # grouped-query attention, tied head
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    # per-head norms, a head size that is not hidden / heads, untied head
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, num_attention_heads=6, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)
    ),
    # every head has its own keys, and attention has a window of 24 tokens
    "mistral-window": lambda: MistralForCausalLM(
        MistralConfig(
            **SHAPE, num_attention_heads=4, num_key_value_heads=4, sliding_window=24, tie_word_embeddings=False
        )
    ),
}


def build(name: str) -> Any:
    torch.manual_seed(5)
    return MODELS[name]().eval()


def experts_model(experts: int = 8) -> Any:
    """Qwen3-MoE: a dense layer between two with experts, of which 2 compute each token."""
    torch.manual_seed(5)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape: dict[str, Any] = SHAPE | heads | {"num_hidden_layers": 3}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**shape, num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=24,
                       mlp_only_layers=[1], norm_topk_prob=True, tie_word_embeddings=False)
    ).eval()  # fmt: skip


def requests(count: int, *, temperature: float = 1.0, seed: int = 0, longest: int = 40) -> list[Request]:
    """Requests with uneven prompts and lengths; every third one is a sibling: it has the prompt of the one before."""
    rng = random.Random(seed)
    out: list[Request] = []
    for i in range(count):
        prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 45)))
        if i % 3 == 1:
            prompt = out[-1].prompt
        out.append(
            Request(id=str(i), prompt=prompt, seed=1000 + i, max_tokens=rng.randint(1, longest),
                    sampling=Sampling(temperature=temperature), group=f"g{i - (i % 3 == 1)}")
        )  # fmt: skip
    return out


def engine(model: Any, **options: Any) -> TorchEngine:
    return TorchEngine(model, **{"kv_tokens": 4096, "max_running": 16, "max_rows": 64, **options})


def drain(e: Any, asked: Iterable[Request] = ()) -> dict[str, list[Chunk]]:
    """Add the requests and step until all have finished, with a check of the rules after every step."""
    out: dict[str, list[Chunk]] = {}
    for r in asked:
        e.add(r)
    for _ in range(100_000):
        if not len(e):
            return out
        for chunk in e.step():
            out.setdefault(chunk.id, []).append(chunk)
        e.check()
    raise AssertionError("the engine does not finish")


def tokens(chunks: Iterable[Chunk]) -> list[int]:
    return [t for c in chunks for t in c.tokens]


def logprobs(chunks: Iterable[Chunk]) -> list[float]:
    return [x for c in chunks for x in c.logprobs]
