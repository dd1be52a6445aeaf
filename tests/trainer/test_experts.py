"""The spread of tokens over experts: every token of an update counts once, as transformers' own router logits say."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from windfall import algorithms
from windfall.controller.step_batch import describe_updates
from windfall.link import messages as m
from windfall.models import attention
from windfall.recipe.file import parse_recipe
from windfall.trainer.model.experts import spread
from windfall.trainer.trainer import TorchTrainer
from windfall.training import Report, Sample

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "num_experts_per_tok": 2,
}  # fmt: skip
MODELS: dict[str, Any] = {
    # Its second layer has no experts.
    "qwen3": Qwen3MoeConfig(**SHAPE, num_experts=8, moe_intermediate_size=16, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=8),
}


def model_of(name: str) -> Any:
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=attention.NAME).eval()


def samples(count: int) -> list[Sample]:
    """One of three has nothing to learn from."""
    rng, out = np.random.default_rng(0), []
    for i in range(count):
        length = int(rng.integers(4, 30))
        ids = tuple(rng.integers(0, 61, length + 2).tolist())
        targets = tuple(range(2, length + 2))
        advantage = float(i % 3)
        out.append(Sample(ids=ids, targets=targets, behavior=np.full(length, -4.1), advantage=advantage, limit=64))
    return out


def trainer_of(model: Any, *, kl: float = 0.0, reference: Any = None) -> TorchTrainer:
    recipe = parse_recipe({"train": {"engine_gap_limit": 50.0}, "algorithm": {"kl": kl}}, where="test")
    return TorchTrainer(model, algorithms.make("grpo"), recipe, micro_tokens=64, reference=reference)


def expected(name: str, made: list[Sample]) -> list[list[int]]:
    """Tokens of every expert, by layer, from the router logits that transformers returns."""
    model = model_of(name)
    model.set_attn_implementation("eager")
    counts: list[torch.Tensor] = []
    for s in made:
        with torch.no_grad():
            logits = model(torch.tensor([s.ids]), output_router_logits=True).router_logits
        chosen = [x.reshape(-1, 8).topk(2).indices.flatten().bincount(minlength=8) for x in logits]
        counts = [a + b for a, b in zip(counts, chosen, strict=True)] if counts else chosen
    return [c.tolist() for c in counts]


@pytest.mark.parametrize(
    ("name", "how"), [("qwen3", "plain"), ("qwen3", "recompute"), ("qwen3", "kl"), ("mixtral", "prepared")]
)
def test_every_token_is_counted_once(name: str, how: str) -> None:
    model, made = model_of(name), samples(9)
    t = trainer_of(model, **({"kl": 0.1, "reference": model_of(name)} if how == "kl" else {}))
    if how == "recompute":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    t.begin()
    ready = t.prepare(made) if how == "prepared" else made
    t.accumulate(samples(2))
    t.begin()  # drops what was accumulated
    for part in (ready[:4], ready[4:]):
        t.accumulate(part)
    wanted = expected(name, made)
    assert len(wanted) == (2 if name == "qwen3" else 3)
    assert sum(wanted[0]) == 2 * sum(len(s.ids) for s in made)
    assert t.experts.read().tolist() == [n for layer in wanted for n in layer]
    report = t.finish()
    assert report.skipped == ""
    assert report.experts == spread(wanted)
    assert not t.experts.read().any()


def test_router_that_prefers_two_experts_is_seen() -> None:
    model = model_of("qwen3")
    gate = model.model.layers[2].mlp.gate.weight
    with torch.no_grad():
        gate.zero_()
    t = trainer_of(model)
    t.accumulate(samples(4))
    found = t.finish().experts
    assert found is not None
    assert (found["unused"], found["load_min"], found["load_max"]) == (6, 0.0, 4.0)
    assert found["layers"][1] == pytest.approx(np.log(2) / np.log(8), abs=1e-5)
    assert found["layers"][0] > 0.8
    assert found["balance"] == pytest.approx(np.mean(found["layers"]))


def test_step_event_has_the_spread_of_the_last_update_that_trained() -> None:
    even, found = spread([[1, 1, 1, 1]]), spread([[3, 1, 0, 0]])
    reports = [Report(tokens=n, responses=1, experts=experts) for n, experts in ((5, even), (5, found), (0, None))]
    sent = [msgspec.msgpack.encode(m.Optimized(report=asdict(r))) for r in reports]
    received: list[Any] = [Report(**msgspec.msgpack.decode(x, type=m.Optimized).report) for x in sent]
    assert received == reports
    fields = describe_updates(received)
    assert {k: v for k, v in fields.items() if k.startswith("experts")} == {f"experts_{k}": v for k, v in found.items()}
    assert not any(k.startswith("experts") for k in describe_updates([Report(tokens=5, responses=1)]))


def test_dense_model_has_no_experts() -> None:
    shape = {k: v for k, v in SHAPE.items() if k != "num_experts_per_tok"}
    t = trainer_of(AutoModelForCausalLM.from_config(Qwen3Config(**shape), attn_implementation=attention.NAME).eval())
    t.accumulate(samples(3))
    assert t.finish().experts is None
