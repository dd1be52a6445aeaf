"""Where a trainer's state will be, and the GPU memory that it plans with, before anything is trained."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    Ernie4_5_MoeConfig,
    GPT2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from windfall.errors import WindfallError
from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer.memory_plan import MemoryPlan, layout_of, plan_memory
from windfall.trainer.model.activation_memory import MAX_MEMORY_SHARE
from windfall.trainer.model.lora import trained_parameters
from windfall.trainer.ranks.rank_budget import ModelShape
from windfall.trainer.ranks.state_layout import StateLayout, choose
from windfall.turns.residence import MEMORY_SHARE

MODEL: Any = load.load("tiny", dtype="bfloat16", device="cpu")
WHOLE = sum(p.numel() for p in MODEL.parameters())
GB = 1e9
SIZES: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 10_000, "tie_word_embeddings": False,
}  # fmt: skip
BILLIONS = 8_190_735_360
"""Parameters of the larger model."""


@cache
def eight_billion() -> Any:
    """A model of 8.19 billion parameters, without memory."""
    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def recipe(
    *, lora: bool = False, local: bool = False, kl: float = 0.0, offload: Any = "auto", optimizer: str = "adamw",
    micro_tokens: int = 0,
) -> Recipe:  # fmt: skip
    train: dict[str, Any] = {"offload": offload, "optimizer": optimizer, "micro_tokens": micro_tokens}
    train |= {"lora": {"rank": 4}} if lora else {}
    return parse_recipe({"train": train, "fleet": {"local": local}, "algorithm": {"kl": kl}}, where="test")


def plan(recipe: Recipe, gpu: float = 141 * GB, host: float = 200 * GB, **place: Any) -> MemoryPlan:
    """Of the 8B model; unsharded, its weights are on the GPU already."""
    free = gpu if place.get("sharded") else gpu - 2 * BILLIONS
    return plan_memory(recipe, eight_billion(), 2048, free=free, total=gpu, host=host, **place)


def test_what_the_state_of_a_rank_needs() -> None:
    for ranks in (1, 4):
        assert layout_of(recipe(), MODEL, ranks=ranks, sharded=True).gpu_bytes == WHOLE * 16 / ranks
    assert layout_of(recipe(), MODEL).gpu_bytes == WHOLE * 18
    assert layout_of(recipe(), load.load("tiny", dtype="float32", device="cpu")).gpu_bytes == WHOLE * 16
    assert layout_of(recipe(), MODEL, trains=False).gpu_bytes == WHOLE * 2
    section = recipe(lora=True).train.lora
    adapters, several = trained_parameters(MODEL, section), layout_of(recipe(lora=True), MODEL, ranks=4, sharded=True)
    assert 0 < adapters < WHOLE
    assert several.gpu_bytes == 2 * WHOLE / 4 + 18 * adapters
    assert section is not None
    beside = layout_of(recipe(lora=True), MODEL, beside=[section])
    assert beside.trained == 2 * adapters


def test_as_much_as_fits_stays_on_the_gpu() -> None:
    large, alone = plan(recipe(), 250 * GB), plan(recipe())
    assert large.layout.host_share == 0
    assert 0.2 < alone.layout.host_share < 0.6
    assert alone.peak_bytes < 141 * GB
    assert alone.pack_tokens >= 8192, "nothing is computed twice for a pack of this size"
    assert alone.layout.gpu_bytes + alone.layout.host_bytes == pytest.approx(18 * BILLIONS)
    small = plan(recipe(), 80 * GB)
    assert small.layout.host_share == 1.0
    assert small.layout.gpu_bytes == pytest.approx(6 * BILLIONS)
    assert plan(recipe(offload=True), 250 * GB).layout.host_share == 1.0
    assert "masters and moments in host memory" in alone.describe()


def test_with_8_bit_moments_all_of_an_8b_model_stays_on_one_gpu() -> None:
    found = plan(recipe(optimizer="adamw_8bit"))
    assert found.layout.host_share == 0
    assert 12 * BILLIONS < found.layout.gpu_bytes < 12.1 * BILLIONS
    assert found.peak_bytes < 141 * GB
    assert plan(recipe(optimizer="adamw_8bit"), 100 * GB).layout.describe().count("masters and 8-bit moments in host")
    adapters = (layout_of(recipe(lora=True, optimizer=name), MODEL) for name in ("adamw", "adamw_8bit"))
    assert len(set(adapters)) == 1


def test_all_experts_have_a_state_and_a_token_has_the_activations_of_those_that_compute_it() -> None:
    fields: dict[str, Any] = SIZES | {"moe_intermediate_size": 768, "num_experts_per_tok": 8}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**fields, num_experts=64), dtype=torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    few, many = (ModelShape.of(fields | {"num_experts": n}) for n in (8, 64))
    assert few.parameters == few.active_parameters
    assert many.parameters == pytest.approx(count, rel=1e-3)
    assert many.active_parameters < 0.3 * count
    assert few.kept(2) == many.kept(2)
    assert many.kept(2).all > 2 * ModelShape.of(SIZES).kept(2).all
    found = plan_memory(recipe(), model, 2048, free=141 * GB, total=141 * GB, host=0.0)
    assert found.layout.gpu_bytes == 18 * count


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=64, n_head=4, n_layer=4, vocab_size=100),
        CTRLConfig(n_embd=64, n_head=4, n_layer=4, dff=256, vocab_size=100),
        Ernie4_5_MoeConfig(**SIZES, moe_num_experts=16, moe_k=6, moe_intermediate_size=256),
    ],
)
def test_models_with_other_names_for_their_sizes_are_planned(config: Any) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shape = ModelShape.of_model(model)
    assert (shape.layers, shape.hidden, shape.heads) == (4, config.hidden_size, config.num_attention_heads)
    assert (shape.chosen, shape.experts) == ((6, 16) if hasattr(config, "moe_k") else (0, 0))
    found = plan_memory(recipe(), model, 64, free=80 * GB, total=80 * GB, host=80 * GB)
    assert found.layout.trained == sum(p.numel() for p in model.parameters())


def test_other_copies_of_the_weights_leave_less_room() -> None:
    shares = [plan(recipe(kl=kl, local=local)).layout.host_share for kl in (0.0, 0.1) for local in (False, True)]
    assert shares == sorted(shares)
    assert len(set(shares)) == 4


def test_several_ranks_keep_their_masters() -> None:
    two = plan(recipe(), 80 * GB, ranks=2, sharded=True, local_ranks=2)
    assert 0 < two.layout.host_share < 1
    assert two.layout.movable == 8 * BILLIONS / 2
    eight = plan(recipe(), 80 * GB, ranks=8, sharded=True)
    assert eight.layout.host_share == 0


def test_one_rank_that_is_sharded_gathers_copies() -> None:
    one, two = (plan(recipe(), 300 * GB, ranks=n, sharded=True) for n in (1, 2))
    copies = [found.peak_bytes - found.layout.gpu_bytes for found in (one, two)]
    assert copies[0] == copies[1], "weights in the compute dtype, and their gradients"


def test_the_base_of_adapters_is_whole_on_every_rank_if_it_fits() -> None:
    place: dict[str, Any] = {"ranks": 4, "sharded": True}
    large, small = plan(recipe(lora=True), 80 * GB, **place), plan(recipe(lora=True), 24 * GB, **place)
    assert not large.layout.sharded
    assert large.layout.gpu_bytes > 2 * BILLIONS
    assert "on each GPU, with the whole base" in large.describe()
    assert small.layout.sharded
    assert small.layout.gpu_bytes < 0.6 * BILLIONS
    assert "on each GPU, with 1/4 of the base" in small.describe()
    assert small.peak_bytes < 24 * GB


def test_smaller_packs_if_host_memory_is_short() -> None:
    plenty, short = plan(recipe()), plan(recipe(), host=34 * GB)
    assert short.layout.host_bytes <= MEMORY_SHARE * 34 * GB < plenty.layout.host_bytes
    assert short.peak_bytes <= 141 * GB


def test_packs_of_a_given_size_decide_what_else_fits() -> None:
    small, chosen, large = (plan(recipe(micro_tokens=n)) for n in (4096, 0, 32_768))
    assert [small.pack_tokens, large.pack_tokens] == [4096, 32_768]
    assert small.layout.host_share < chosen.layout.host_share < large.layout.host_share
    assert large.peak_bytes <= 141 * GB
    whole_response, shorter = (plan(recipe(micro_tokens=n)) for n in (2048, 100))
    assert shorter == whole_response, "a response is never split over packs"
    with pytest.raises(WindfallError, match="mostly for activations") as refused:
        plan(recipe(micro_tokens=400_000))
    assert "What fits: a lower train.micro_tokens" in str(refused.value)
    responses = recipe().rollout.groups * recipe().rollout.group_size
    few = plan_memory(recipe(micro_tokens=10**7), eight_billion(), 32, free=125 * GB, total=141 * GB, host=200 * GB)
    assert few.pack_tokens == 32 * responses, "a step has no more tokens"


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(WindfallError, match=r"needs 147 GB on the GPU.*can be used") as refused:
        plan(recipe(offload=False))
    assert 'What fits: train.offload = "auto", or train.optimizer = "adamw_8bit", or train.ranks = 2' in str(
        refused.value
    )
    with pytest.raises(WindfallError, match=r"needs at least 49 GB on the GPU, .* 45 GB can be used") as refused:
        plan(recipe(), 45 * GB)
    assert "What fits: train.ranks = 2, or adapters" in str(refused.value)
    with pytest.raises(WindfallError, match=r"and 98 GB of host memory; 80 GB and 40 GB can be used"):
        plan(recipe(), 80 * GB, host=50 * GB)
    sizes: dict[str, Any] = {"gpu_bytes": 80e9, "host_bytes": 100e9, "wanted": 1e9, "least": 1e9}
    with pytest.raises(WindfallError, match="What fits: adapters"):
        choose(StateLayout(trained=10**14), "auto", **sizes)
    with pytest.raises(WindfallError, match="What fits: GPUs with more memory"):
        choose(StateLayout(trained=1, frozen=10**14), "auto", **sizes)


def test_a_frozen_policy_fits_wherever_its_weights_do() -> None:
    assert plan(recipe(), 24 * GB, trains=False).layout.training_bytes == 0


def test_the_prediction_is_state_and_activations() -> None:
    found = plan(recipe(lora=True), 141 * GB)
    assert found.layout.host_share == 0
    left = 141 * GB - found.layout.gpu_bytes
    assert 0 < found.peak_bytes - found.layout.gpu_bytes <= MAX_MEMORY_SHARE * left
