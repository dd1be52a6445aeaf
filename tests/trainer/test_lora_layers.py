"""windfall's own layers with adapters: log-probs and gradients as of plain autograd with `LoraLinear`, and no products
for frozen weights."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.support.engines import plain_layers
from windfall.models import attention
from windfall.recipe.lora import Lora
from windfall.trainer.model import gradients, head, lora
from windfall.trainer.model.activation_memory import ALL, LEAST, LIGHT
from windfall.trainer.model.gradients import Gradients, trained
from windfall.trainer.model.logprobs import Learner
from windfall.training import Sample

plain_layers.install()
SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen3, tied": lambda: Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen2, biases": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
}
CASES: dict[str, tuple[str, Any, str]] = {
    "llama": ("llama", "all", ""),
    "qwen3": ("qwen3, tied", "all", ""),
    "biases": ("qwen2, biases", "all", ""),
    "one of the same input": ("llama", ["v_proj", "down_proj"], ""),
    "not in the first layer": ("qwen3, tied", ["q_proj", "o_proj", "gate_proj"], r"layers\.[12]\."),
    "only in the middle": ("llama", ["up_proj"], r"layers\.1\."),
    "head": ("llama", ["q_proj", "lm_head"], ""),
    "head alone, tied": ("qwen3, tied", ["lm_head"], ""),
    "embeddings": ("llama", ["embed_tokens", "down_proj"], ""),
    "head and embeddings, tied": ("qwen3, tied", ["embed_tokens", "lm_head"], ""),
}
"""Model, targets, and a pattern of the layers that have adapters."""


def adapted(case: str, dtype: torch.dtype = torch.float32) -> lora.Adapters:
    """Adapters that have an effect: B is not zero."""
    name, targets, pattern = CASES[case]
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(FAMILIES[name](), attn_implementation=attention.NAME).eval().to(dtype)
    adapters = lora.attach(model, Lora(rank=3, alpha=4.5, targets=targets), base="", seed=0)
    for n, layer in [*adapters.layers.items()]:
        torch.nn.init.normal_(layer.lora_B, 0.0, 0.2)
        if not re.search(pattern, n):
            parent, _, own = n.rpartition(".")
            plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            plain.weight, plain.bias = layer.weight, layer.bias
            setattr(model.get_submodule(parent), own, plain)
    return adapters


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(ids=tuple(rng.integers(3, 60, n).tolist()), targets=tuple(range(2, n)), behavior=np.zeros(0),
               advantage=1.0, limit=0)
        for n in (9, 31, 14)
    ]  # fmt: skip


def learn(learner: Learner) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs, and all gradients."""
    made, rng = samples(), np.random.default_rng(1)
    weights = [rng.normal(size=len(s.targets)) for s in made]
    assert learner.policy.gradients is not None
    learner.policy.gradients.zero()
    learner.learn(made, 0.8, lambda a, b, logp, entropy: np.concatenate(weights[a:b]))
    named = learner.policy.model.named_parameters()
    return learner.score(made, 0.8)[0], {n: p.grad.clone() for n, p in named if p.grad is not None}


def learners(adapters: lora.Adapters, keep: int) -> tuple[Learner, Learner]:
    """With the layers of transformers, and with the own layers."""
    sums = Gradients(trained(adapters.model))
    plain, own = (Learner(adapters.model, sums, say=lambda line: None) for _ in range(2))
    own.use_own_layers(keep=keep)
    return plain, own


@pytest.mark.parametrize("keep", [ALL, LIGHT, LEAST])
@pytest.mark.parametrize("case", CASES)
def test_own_layers_have_the_gradients_of_plain_autograd(case: str, keep: int) -> None:
    adapters = adapted(case)
    plain, own = learners(adapters, keep)
    (logp, wanted), (found_logp, found) = learn(plain), learn(own)
    assert torch.allclose(found_logp, logp, atol=1e-5)
    names = set(trained(adapters.model))
    assert set(found) == set(wanted) == names
    assert all(lora.is_adapter(n) for n in names)
    for n, g in wanted.items():
        assert float(g.norm()) > 0
        assert float((found[n] - g).norm() / g.norm()) < 2e-5, n


def test_adapters_can_be_switched_off() -> None:
    """Both learners then compute the base model, and the adapters are in effect again afterwards."""
    adapters = adapted("llama")
    plain, own = learners(adapters, ALL)
    before = learn(own)[0]
    with adapters.switched_off():
        base, found = (x.score(samples(), 0.8)[0] for x in (plain, own))
    assert torch.allclose(found, base, atol=1e-5)
    assert float((base - before).abs().max()) > 0.1
    assert torch.equal(learn(own)[0], before)


def test_half_precision_gradients_are_float32_sums_of_adapters_alone() -> None:
    adapters = adapted("qwen3", torch.bfloat16)
    plain, own = learners(adapters, LIGHT)
    wanted, found = learn(plain)[1], learn(own)[1]
    assert {g.dtype for g in found.values()} == {torch.float32}
    for n, g in wanted.items():
        assert float((found[n] - g).norm() / g.norm()) < 0.1, n


def test_backward_pass_computes_nothing_for_frozen_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products that give the gradient of a weight are those of A and B; with trained weights there are others."""
    shapes, add_product = set[tuple[int, ...]](), gradients.add_product

    def recorded(total: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> None:
        shapes.add(tuple(total.shape))
        add_product(total, grad, x)

    monkeypatch.setattr(gradients, "add_product", recorded)
    monkeypatch.setattr(head, "add_product", recorded)
    adapters = adapted("llama")
    learn(learners(adapters, ALL)[1])
    assert shapes == {tuple(p.shape) for p in adapters.tensors().values()}
    adapters.model.requires_grad_(True)
    learn(learners(adapters, ALL)[1])
    assert {tuple(p.shape) for p in adapters.model.parameters() if p.dim() == 2} <= shapes
