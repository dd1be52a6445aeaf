"""Weights with an adapter merged into them: W + scale * B @ A for every adapted matrix, all other weights as they are.

`MergedWeights` is what an engine gets at a swap if the run trains adapters. It computes nothing until a weight is
copied into the engine, and then one matrix at a time, on the engine's device. So a swap needs room for one matrix in
float32, not for a second copy of the model, and decoding is as fast as without adapters. An engine that holds several
adapters beside each other merges nothing: it takes `base`, `pairs` and `scale`.

Rules:
- the sum is computed in float32 and rounded once, to the dtype of the engine. `merge` is the only place that does so:
  workers, the trainer's own engine and `windfall export` get the same bits from the same tensors;
- the two matrices of `NAME.weight` are `NAME.lora_A.weight` (rank x inputs) and `NAME.lora_B.weight` (outputs x rank).
  The weight of the embeddings has a row per token, so there A is rank x size and B tokens x rank;
- an adapter changes one weight. If head and embeddings are one matrix in the base, the engine has two (`untie` of
  models/load.py, `model_config` of its EngineSpec), and otherwise refuses the adapter;
- an adapter that does not fit the base is refused when the mapping is built, before anything is copied.

The functions import torch when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from windfall.errors import WindfallError

if TYPE_CHECKING:
    import torch

WEIGHT, LORA_A, LORA_B = ".weight", ".lora_A.weight", ".lora_B.weight"


def is_repeated(name: str) -> bool:
    """Whether a layer or weight with this name belongs to a decoder layer, unlike the head and the embeddings.

    >>> is_repeated("model.layers.1.mlp.up_proj"), is_repeated("lm_head.weight")
    (True, False)
    """
    return re.search(r"\.\d+\.", name) is not None


class AdapterPair(NamedTuple):
    a: torch.Tensor  # (rank, inputs)
    b: torch.Tensor  # (outputs, rank)


def merge(weight: torch.Tensor, pair: AdapterPair, scale: float) -> torch.Tensor:
    """The merged matrix in float32, on the device of `weight`. It must still be rounded to the dtype of the model."""
    import torch

    with torch.no_grad():
        a, b = (t.to(device=weight.device, dtype=torch.float32) for t in pair)
        return weight.to(torch.float32, copy=True).addmm_(b, a, alpha=scale)


def pairs(adapter: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], where: str) -> dict[str, AdapterPair]:
    """The matrices of an adapter by the name of the weight that they change. `shapes`: those of the weights of the base
    model. Raises WindfallError if the adapter is not complete or does not fit."""
    out: dict[str, AdapterPair] = {}
    for name in adapter:
        layer = name.removesuffix(LORA_A).removesuffix(LORA_B)
        if layer == name or layer + LORA_A not in adapter or layer + LORA_B not in adapter:
            what = f"{name!r} is not one of two matrices NAME{LORA_A} and NAME{LORA_B}"
            raise WindfallError(what, where=where, fix="Use a complete LoRA adapter.")
        out[layer + WEIGHT] = AdapterPair(adapter[layer + LORA_A], adapter[layer + LORA_B])
    for name, (a, b) in out.items():
        if name not in shapes:
            what = f"the adapter is for another model: the base has no weight {name!r}"
            raise WindfallError(what, where=where, fix="Use the base model of this adapter.")
        if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != tuple(shapes[name]) or a.shape[0] != b.shape[1]:
            what = f"the adapter is for a model of another shape: {name!r} is {_size(shapes[name])}, but the adapter "
            what += f"has {_size(b.shape)} and {_size(a.shape)}"
            raise WindfallError(what, where=where, fix="Use the base model of this adapter.")
    return out


class MergedWeights(Mapping[str, "torch.Tensor"]):
    """Read-only, in the order of the base. The tensors of base and adapter may be views that stay valid only for the
    time of one swap."""

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        adapter: Mapping[str, torch.Tensor],
        scale: float,
        *,
        base_is_loaded: bool = False,
    ) -> None:
        """`base_is_loaded`: the engine has the weights of this base that are not adapted, so they are not copied.
        Without an adapter, the weights are those of the base."""
        self.base = base
        self.scale = scale
        self.base_is_loaded = base_is_loaded
        self.pairs = pairs(adapter, {name: t.shape for name, t in base.items()}, "weights")

    @staticmethod
    def of(weights: Mapping[str, torch.Tensor]) -> MergedWeights:
        """These weights, for an engine that holds policies of one base."""
        return weights if isinstance(weights, MergedWeights) else MergedWeights(weights, {}, 1.0)

    @property
    def rank(self) -> int:
        """The largest rank of the matrices."""
        return max((len(pair.a) for pair in self.pairs.values()), default=0)

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The weight, merged if it is adapted, in the dtype and on the device of the base."""
        weight, pair = self.base[name], self.pairs.get(name)
        return weight if pair is None else merge(weight, pair, self.scale).to(weight.dtype)

    def shape(self, name: str) -> torch.Size:
        """The shape of a weight. Does not compute the weight."""
        return self.base[name].shape

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Write the weight into the engine's own tensor. An adapted one is computed on the device of `target`."""
        weight, pair = self.base[name], self.pairs.get(name)
        if pair is not None:
            target.copy_(merge(weight.to(target.device), pair, self.scale))
        elif not self.base_is_loaded:
            target.copy_(weight)


def _size(shape: torch.Size) -> str:
    return " x ".join(map(str, shape))
