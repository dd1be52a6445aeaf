"""Random adapters of a small model, as a worker gives them to an engine, and the same merged into a model of their
own."""

from __future__ import annotations

import copy
from typing import Any

import torch

from windfall.models import load
from windfall.weights.merged import LORA_A, LORA_B, WEIGHT, MergedWeights, is_repeated

RANK = 4
PARTS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def random_adapter(
    model: Any, seed: int, *, rank: int = RANK, parts: tuple[str, ...] = PARTS, size: float = 0.3
) -> dict[str, torch.Tensor]:
    """Matrices for these layers, of every decoder layer or at the ends, large enough to change most tokens."""
    noise, out = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for name, weight in model.state_dict().items():
        layer = name.removesuffix(WEIGHT)
        if layer.endswith(parts):
            outputs, inputs = weight.shape
            out[layer + LORA_A] = size * torch.randn(rank, inputs, generator=noise).to(weight.dtype)
            out[layer + LORA_B] = size * torch.randn(outputs, rank, generator=noise).to(weight.dtype)
    return out


def given(model: Any, adapter: dict[str, torch.Tensor], scale: float = 0.5, *, loaded: bool = False) -> MergedWeights:
    """What a worker gives to its engine. `loaded`: the engine has the base."""
    base = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return MergedWeights(base, adapter, scale, base_is_loaded=loaded)


def merged(model: Any, adapter: dict[str, torch.Tensor], scale: float = 0.5) -> Any:
    """A copy of the model with the adapter merged into it."""
    out = copy.deepcopy(model)
    if any(not is_repeated(name) for name in adapter):
        load.untie(out)
    out.load_state_dict(dict(given(model, adapter, scale)))
    return out
