"""The section [train.lora]: training of adapters instead of all weights (docs/adapters.md)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from pydantic import Field

from windfall.errors import WindfallError, nearest
from windfall.recipe.section_base import Count, FilePath, Section

DEFAULT_RANK = 16
DEFAULT_ALPHA_PER_RANK = 2.0

Target = Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")]


class Lora(Section):
    """Train low-rank adapters (LoRA) instead of all weights. Without this section, all weights are trained."""

    rank: Count | None = None
    """Rank of the adapters. If left out: that of the adapter in `path`, otherwise 16."""
    alpha: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The product of the two adapter matrices is multiplied by `alpha` / `rank`. If left out: as in the adapter in
    `path`, otherwise twice the rank."""
    targets: Literal["all"] | Annotated[list[Target], Field(min_length=1)] = "all"
    """Layers that get an adapter, by the last part of their names, such as ["q_proj", "v_proj"], or by a module that
    they are in, such as ["self_attn"]: linear layers of the decoder layers, "lm_head" and "embed_tokens". "all" means
    every linear layer of the decoder layers; with `path`, the layers of that adapter."""
    path: FilePath | None = None
    """Directory of an adapter in Hugging Face PEFT format to start from. If left out, the first step generates with the
    model as it is."""


def choose_layers(linear: Iterable[str], targets: str | Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """The names of the layers that `targets` mean. `linear`: the names of the linear layers of the decoder layers.
    `others`: those of the head and the embeddings, which "all" does not mean.

    >>> choose_layers(["model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"], ["up_proj"])
    ['model.layers.0.mlp.up_proj']
    >>> choose_layers(["model.layers.0.mlp.up_proj"], ["lm_head", "up_proj"], ["lm_head", "model.embed_tokens"])
    ['model.layers.0.mlp.up_proj', 'lm_head']
    """
    repeated = list(linear)
    names = [*repeated, *others]
    if not repeated:
        what = "this model has no plain linear layers in its decoder layers, so it cannot have adapters"
        raise WindfallError(what, where="train.lora", fix="Remove the section to train all weights.")
    if isinstance(targets, str):
        return repeated
    for target in targets:
        if not any(_matches(name, target) for name in names):
            fix = nearest(target.rpartition(".")[2], {name.rpartition(".")[2] for name in names})
            raise WindfallError(f"no layer named {target!r} in this model", where="train.lora.targets", fix=fix)
    return [name for name in names if any(_matches(name, target) for target in targets)]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or f".{target}." in name
