"""Training on several ranks gives what one rank gives, up to float32 rounding: losses, gradients, weights, reports.

The ranks are real processes that talk over gloo. The models are small, but of every kind that is treated in its own
way: tied and untied heads, norms of queries and keys, experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import run_ranks
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from windfall import algorithms, config
from windfall.engine.torch import attention
from windfall.train.ranks import Orders, Ranks
from windfall.train.sample import Sample
from windfall.train.sharding import rows, sharded_policy
from windfall.train.trainer import TorchTrainer

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
UPDATES = 5


def make_model(name: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(
        MODELS[name], dtype=torch.float32, attn_implementation=attention.NAME
    ).eval()


def make_samples(seed: int, count: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt, length = int(rng.integers(1, 8)), int(rng.integers(1, 30))
        sample = Sample(
            ids=tuple(int(t) for t in rng.integers(0, 61, prompt + length)),
            targets=tuple(range(prompt, prompt + length)), behavior=rng.normal(-4.1, 0.3, length),
            advantage=float(rng.normal()) if i % 4 else 0.0, limit=64,
        )  # fmt: skip
        out.append(sample)
    return out


def batches() -> list[list[list[Sample]]]:
    """The samples of every update in groups, as they arrive. One has fewer samples than there are ranks, with none to
    learn from."""
    return [[make_samples(10 * u + g, count) for g, count in enumerate((9, 1, 3))] for u in range(UPDATES)]


def make_trainer(name: str, ranks: Ranks, *, kl: float = 0.0, offload: bool = False) -> TorchTrainer:
    sections: dict[str, Any] = {
        "train": {"lr": 1e-2, "engine_gap_limit": 50.0, "engine_gap_alarm": 50.0, "weight_decay": 0.1},
        "algorithm": {"kl": kl},
        "run": {"steps": 20},
    }
    recipe = config.parse(sections, where="test")
    model: Any = make_model(name) if ranks.first else None
    reference: Any = make_model(name) if kl else None
    if ranks.size > 1:
        source = model.state_dict() | dict(model.named_buffers()) if ranks.first else None
        options: dict[str, Any] = {"dtype": torch.float32, "offload": offload}
        model = sharded_policy(MODELS[name], source, ranks, **options)
        if kl:
            source = reference.state_dict() | dict(reference.named_buffers())
            reference = sharded_policy(MODELS[name], source if ranks.first else None, ranks, trained=False, **options)
    algorithm = algorithms.make("grpo")
    return TorchTrainer(model, algorithm, recipe, micro_tokens=64, orders=Orders(ranks), reference=reference)


def whole(ranks: Ranks, t: torch.Tensor) -> torch.Tensor | None:
    parts = ranks.gather(rows(t).clone())
    return torch.cat(parts) if parts is not None else None


def train(ranks: Ranks, name: str, kl: float) -> Any:
    """Five updates. From rank 0: reports, gradients before the last update, weights after it."""
    t = make_trainer(name, ranks, kl=kl)
    reports, gradients = [], {}

    def collect() -> Any:
        return {n: whole(ranks, p.grad) for n, p in t.model.named_parameters() if p.grad is not None}

    t.orders.add("collect", collect)
    t.orders.add("weights", lambda: {n: whole(ranks, p) for n, p in t.model.named_parameters()})
    if not ranks.first:
        t.orders.follow()
        return None
    for groups in batches():
        t.begin()
        for group in groups:
            t.accumulate(group)
        gradients = t.orders.call("collect")
        reports.append(t.finish())
    weights = t.orders.call("weights")
    t.orders.stop()
    return reports, gradients, weights


@pytest.mark.parametrize("name", MODELS)
def test_ranks_agree_with_one_rank(name: str) -> None:
    kl = 0.1 if name == "llama tied" else 0.0
    ((reports, gradients, weights),) = run_ranks(1, train, name, kl)
    assert all(r.grad_norm > 0 for r in reports)
    for size in (2, 4):
        found = run_ranks(size, train, name, kl)[0]
        for one, several in zip(reports, found[0], strict=True):
            for key in ("tokens", "responses", "skipped"):
                assert getattr(one, key) == getattr(several, key)
            for key in ("grad_norm", "entropy", "engine_gap", "engine_gap_max", "clipped", "kl"):
                assert getattr(several, key) == pytest.approx(getattr(one, key), rel=1e-4, abs=1e-6), key
        for what, ours, theirs in (("gradient", found[1], gradients), ("weight", found[2], weights)):
            assert ours.keys() == theirs.keys()
            for n, value in theirs.items():
                difference = float((ours[n] - value).norm() / value.norm().clamp(min=1e-6))
                assert difference < 2e-4, f"{what} {n} of {size} ranks differs by {difference:.2g}"
