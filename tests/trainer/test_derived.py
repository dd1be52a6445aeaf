"""The spec of engines whose adapters change the head or the embeddings: two matrices if they are merged. And when
activations are computed again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from windfall.errors import WindfallError
from windfall.models import attention, load
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer import derived
from windfall.trainer.model import lora
from windfall.trainer.model.logprobs import PolicyModule
from windfall.trainer.model.packs import pack_rows
from windfall.training import Sample


def tied(recipe: dict[str, Any]) -> bool:
    """Whether engines of this recipe are built with one matrix for head and embeddings, as the tiny model has it."""
    parsed = parse_recipe({"model": {"path": "tiny"}, **recipe}, where="test")
    config = load.load("tiny", dtype="float32", device="cpu").config
    names = parsed.names()
    spec = derived.base_spec(parsed, names, config, "float32", dict.fromkeys(names, 100))
    assert config.tie_word_embeddings
    return json.loads(spec.model_config)["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("targets", "one"),
    [("all", True), (["q_proj"], True), (["q_proj", "lm_head"], False), (["model.embed_tokens"], False)],
)
def test_engine_of_a_merged_head_has_two_matrices(tmp_path: Path, targets: Any, one: bool) -> None:
    assert tied({"train": {"lora": {"targets": targets}}}) == one
    model = load.load("tiny", dtype="float32", device="cpu")
    lora.attach(model, Lora(rank=2, targets=targets), base="tiny", seed=0).save_pretrained(tmp_path)
    assert tied({"train": {"lora": {"path": str(tmp_path)}}}) == one


def test_adapters_beside_each_other_change_no_matrix() -> None:
    policies = {"solver": {}, "verifier": {"lora": {"targets": ["q_proj"]}}}
    recipe = {"policies": policies, "train": {"lora": {"targets": ["lm_head"]}}}
    assert tied(recipe)
    with pytest.raises(WindfallError, match="vLLM holds no adapters of the head or the embeddings"):
        tied(recipe | {"engine": {"name": "vllm"}})


SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SHAPE),
        Qwen3MoeConfig(**SHAPE, num_experts=16, num_experts_per_tok=8, moe_intermediate_size=64),
    ],
    ids=["dense", "experts"],
)
def test_activations_are_computed_again_if_they_fill_much_of_the_memory(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "auto" goes by an estimate of what autograd keeps, which is measured here."""
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    recipe = parse_recipe({"train": {"micro_tokens": 256}, "rollout": {"max_tokens": 200}}, where="test")
    for share, again in ((0.18, False), (0.5, True)):
        monkeypatch.setattr(derived, "free_bytes", lambda device="cpu", share=share: kept_bytes(model, 256) / share)
        assert derived.derive(recipe, model, "cpu", "float32", [20]).checkpoint_activations == again


def kept_bytes(model: Any, tokens: int) -> int:
    """What autograd keeps of a pass over this many tokens, apart from weights."""
    weights, kept = {t.untyped_storage().data_ptr() for t in model.parameters()}, dict[int, torch.UntypedStorage]()

    def keep(t: torch.Tensor) -> torch.Tensor:
        if (storage := t.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return t

    sample = Sample(ids=(5,) * tokens, targets=(1,), behavior=np.zeros(1), advantage=1.0, limit=tokens)
    rows = pack_rows([sample], torch.device("cpu")).rows
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        PolicyModule(model).transformers_body(rows)
    return sum(storage.nbytes() for storage in kept.values())
