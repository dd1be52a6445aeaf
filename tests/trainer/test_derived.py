"""The spec of engines whose adapters change the head or the embeddings: two matrices if they are merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import Lora
from windfall.trainer import derived
from windfall.trainer.model import lora


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
