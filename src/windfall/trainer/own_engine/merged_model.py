"""The module that the trainer's own engine runs if the run trains adapters.

The trainer computes W x + scale * B (A x). The engine needs plain matrices: adapters would cost two more products per
layer and token, and the GPU engine joins matrices with the same input into one. So the engine gets a module of its own
that shares every weight with the trainer's module, except the adapted matrices. Of these it has merged copies, computed
as on every other worker (weights/merged.py), so that it generates what the workers generate. The other choices were
worse: merging into the trainer's own matrices and subtracting again would change the base by rounding, step after step,
and a second whole model would take twice the memory.

Rules:
- the copies follow the trainer only when `merge` is called, so they always belong to one version;
- matrices that an engine joins with an adapted one are copied, too. Otherwise the trainer's matrix would become a part
  of the joined tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from windfall.engine.module_weights import copy_tree, replace_linear
from windfall.trainer.model.lora import LoraLayer, LoraLinear
from windfall.weights.merged import merge

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that an engine may join, by the last parts of their names (engine/cuda/decoder.py)."""


class MergedModel:
    def __init__(self, model: Any) -> None:
        """`model`: the trainer's module, with adapters attached."""
        self.module: Any = copy_tree(model)
        self._adapted: list[tuple[Tensor, LoraLayer]] = []
        """The merged copies, and the trainer's layers that they belong to."""
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                self._adapted.append((self._replace(name, layer), layer))
        for name in _beside(model):
            layer = model.get_submodule(name)
            with torch.no_grad():
                self._replace(name, layer).copy_(layer.weight)
        self.merge()

    @torch.no_grad()
    def merge(self) -> None:
        """Compute the copies from the present weights of the trainer."""
        for own, layer in self._adapted:
            own.copy_(merge(layer.weight, layer.pair(""), layer.scales[""]))  # it is for runs with one policy

    def _replace(self, name: str, layer: Any) -> Tensor:
        """Put a plain layer with a matrix of its own at this place. Returns the matrix."""
        own = nn.Parameter(torch.empty_like(layer.weight), requires_grad=False)
        if isinstance(layer, nn.Embedding):
            plain = nn.Embedding.from_pretrained(own, freeze=True, padding_idx=layer.padding_idx)
            plain.weight = own
            parent, _, last = name.rpartition(".")
            setattr(self.module.get_submodule(parent), last, plain)
        else:
            replace_linear(self.module, name, nn.Linear, own)
        return own


def _beside(model: Any) -> list[str]:
    """Names of the layers without an adapter that an engine may join with one that has an adapter."""
    out = []
    for parent, module in model.named_modules():
        for group in JOINED:
            layers = {name: getattr(module, name, None) for name in group}
            if any(isinstance(layer, LoraLinear) for layer in layers.values()):
                out += [f"{parent}.{name}" for name, layer in layers.items() if type(layer) is nn.Linear]
    return out
