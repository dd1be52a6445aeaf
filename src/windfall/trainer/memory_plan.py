"""What the trainer's memory will be used for, decided before anything is trained: where the state is (state_layout.py),
how many tokens a pack has, and the most memory that the GPU will need."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windfall.recipe.lora import Lora
from windfall.recipe.sections import Recipe
from windfall.trainer.model import activation_memory
from windfall.trainer.ranks import state_layout
from windfall.trainer.ranks.rank_budget import ModelShape, rank_budget
from windfall.trainer.ranks.state_layout import StateLayout, moment_bytes
from windfall.turns import residence
from windfall.turns.client import SOCKET

OWN_ENGINE_SHARE = 0.3
"""Share of the free memory that the KV cache of an engine on the trainer's device may use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """What the memory of one rank is used for."""

    layout: StateLayout
    pack_tokens: int
    peak_bytes: float
    """Most bytes of the GPU in use while it trains."""

    def describe(self) -> str:
        return f"{self.layout.describe()}; packs of {self.pack_tokens:,} tokens; at most {self.peak_bytes / 1e9:.1f} GB"


def layout_of(
    recipe: Recipe, model: Any, *, ranks: int = 1, sharded: bool = False, trains: bool = True,
    beside: Sequence[Lora] = (),
) -> StateLayout:  # fmt: skip
    """The layout with everything on the device. `sharded`: there are ranks over which weights may be split. `trains`:
    the policy is trained, or a slot to train in. `beside`: adapters of others that are."""
    from windfall.trainer.model.lora import trained_parameters

    section = recipe.train.lora
    trained = sum(trained_parameters(model, each) for each in ((section, *beside) if trains else beside))
    frozen = 0 if trains and section is None else sum(p.numel() for p in model.parameters())
    return StateLayout(
        trained=trained, frozen=frozen, value_bytes=model.dtype.itemsize, ranks=ranks, sharded=sharded,
        moment_bytes=moment_bytes(recipe.train.optimizer, adapters=section is not None),
    )  # fmt: skip


def plan_memory(
    recipe: Recipe, model: Any, longest: int, *, free: float, total: float, host: float, local_ranks: int = 1,
    **place: Any,
) -> MemoryPlan:  # fmt: skip
    """`free`, `total`: bytes of the GPU. Unsharded, the weights are there already. `host`: free bytes of host memory,
    for the `local_ranks` of this machine. `place`: as in `layout_of`. Raises WindfallError if nothing fits."""
    layout, context = layout_of(recipe, model, **place), recipe.train.context_parallel
    shape, width = ModelShape.of_model(model), model.dtype.itemsize
    asked = min(recipe.train.micro_tokens, longest * recipe.rollout.groups * recipe.rollout.group_size)
    pack = max(longest, asked)  # a response is never split over packs
    each, layers, of_rank = shape.kept(width), shape.layers, -(-pack // context)
    whole = width * sum(p.numel() for p in model.parameters())
    if SOCKET in os.environ:  # states of other jobs sleep when this one trains
        free = max(free, residence.STATE_SHARE * total)
    copies, adapters = _copies(recipe, layout, whole), layout.trained if layout.frozen else 0
    budget = rank_budget(
        shape, layout.ranks, pack_tokens=1, value_bytes=width, adapter_parameters=adapters, sharded=layout.sharded
    )
    others = copies + budget.gathered
    room = free + (0 if layout.sharded else whole)
    share = 1.0 - OWN_ENGINE_SHARE if recipe.fleet.local else 1.0
    least = activation_memory.needed_bytes(of_rank, layers, each, least=True) / share + others
    comfortable = of_rank if asked else max(of_rank, activation_memory.SMALL_PACK)
    wanted = activation_memory.needed_bytes(comfortable, layers, each) / share + others
    layout = state_layout.choose(
        layout, recipe.train.offload, gpu_bytes=room, wanted=wanted, least=least,
        host_bytes=residence.MEMORY_SHARE * host / local_ranks,
        others=["a lower train.micro_tokens"] if asked > longest else [],
    )  # fmt: skip
    if not layout.sharded:  # nothing is gathered
        others = copies
    left = (room - others - layout.gpu_bytes) * share
    if not asked:
        pack = context * activation_memory.pack_tokens(left, layers, each, of_rank)
    kept = activation_memory.needed_bytes(-(-pack // context), layers, each) * activation_memory.MAX_MEMORY_SHARE
    kept = min(kept, activation_memory.MAX_MEMORY_SHARE * left)
    return MemoryPlan(layout=layout, pack_tokens=pack, peak_bytes=layout.gpu_bytes + kept + others)


def _copies(recipe: Recipe, layout: StateLayout, whole: float) -> float:
    """Bytes of other copies of the weights. `whole`: of one copy."""
    if recipe.train.lora is None:  # the KL reference
        return whole / layout.ranks * (recipe.algorithm.kl > 0)
    # The own engine has merged copies; with several ranks a whole one, which it frees for training.
    return whole * (recipe.fleet.local and not layout.sharded)
