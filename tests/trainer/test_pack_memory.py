"""The GPU memory that a trainer plans with, before it chooses the tokens of a pack."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from windfall.models import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.trainer.derived import memory_use
from windfall.trainer.model.lora import trained_parameters

FREE = 1e12
MODEL: Any = load.load("tiny", dtype="bfloat16", device="cpu")
WHOLE = sum(p.numel() for p in MODEL.parameters())


def recipe(*, lora: bool = False, local: bool = False, kl: float = 0.0, offload: bool = False) -> Recipe:
    train = {"offload": offload} | ({"lora": {"rank": 4}} if lora else {})
    return parse_recipe({"train": train, "fleet": {"local": local}, "algorithm": {"kl": kl}}, where="test")


def test_rank_has_its_rows_of_weights_gradients_and_moments() -> None:
    for ranks in (1, 4):
        assert memory_use(recipe(), MODEL, FREE, ranks=ranks, sharded=True) == WHOLE * 16 / ranks
        assert memory_use(recipe(kl=0.1), MODEL, FREE, ranks=ranks, sharded=True) == WHOLE * (16 + 2) / ranks
    assert memory_use(recipe(), MODEL, FREE) == WHOLE * 16


def test_float32_weights_are_not_on_the_gpu_yet_if_they_are_sharded() -> None:
    model = load.load("tiny", dtype="float32", device="cpu")
    assert memory_use(recipe(), model, FREE, ranks=2, sharded=True) == WHOLE * 16 / 2
    assert memory_use(recipe(), model, FREE) == WHOLE * 12


def test_frozen_base_of_adapters_is_split_over_the_ranks() -> None:
    adapters = trained_parameters(MODEL, recipe(lora=True).train.lora)
    assert 0 < adapters < WHOLE
    expected = (2 * WHOLE + 16 * adapters) / 4
    assert memory_use(recipe(lora=True, kl=0.1), MODEL, FREE, ranks=4, sharded=True) == pytest.approx(expected)
    assert memory_use(recipe(lora=True, local=True), MODEL, FREE, ranks=4, sharded=True) == pytest.approx(
        expected + 2 * WHOLE
    )
    assert memory_use(recipe(lora=True, local=True), MODEL, WHOLE, ranks=4, sharded=True) == pytest.approx(expected), (
        "too large to keep"
    )


def test_nothing_stays_on_the_gpu_with_offload() -> None:
    for lora in (False, True):
        assert memory_use(recipe(lora=lora, kl=0.1, offload=True), MODEL, FREE, ranks=4, sharded=True) == 0
    kept = memory_use(recipe(lora=True, local=True, offload=True), MODEL, FREE, ranks=4, sharded=True)
    assert kept == 2 * WHOLE, "the engine's copy of the base"
    assert MODEL.dtype == torch.bfloat16
