"""The adapters of the GPU engine on the device: the matrices of all policies, and which rows of a pass use which.

    y = x @ W.T + (scale * x @ A.T) @ B.T       A (adapters, parts * rank, inputs)     B (adapters, outputs, rank)

The adapters of joined projections are joined as well: their parts (queries, keys, values) read the same input, so one
kernel computes x @ A.T for all of them. The kernels work on groups of rows: some rows that use the same adapter.

Rules:
- the tensors are allocated once, for the largest rank and all layers, and never move: captured graphs refer to them;
- a smaller rank is padded with zeros, and so is a layer that an adapter does not change;
- rows without an adapter are in no group: nothing is added to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.errors import WindfallError
from windfall.weights.merged import WEIGHT, AdapterPair

PROJECTIONS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "out": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
"""The projections of a layer, and the linear layers that each of them joins (decoder.py)."""
LEAST_RANK = 16
"""The smallest size of a matrix product of the kernels."""


def padded_rank(rank: int) -> int:
    """
    >>> [padded_rank(n) for n in (1, 16, 20, 64)]
    [16, 16, 32, 64]
    """
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


def rows_of_tile(rows: int) -> int:
    """Upper limit for the rows of a group: the larger, the fewer times the matrices are read."""
    return 16 if rows <= 1024 else 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ProjectionAdapters:
    """The adapters of one projection."""

    a: Tensor  # (adapters, parts * rank, inputs)
    b: Tensor  # (adapters, outputs of all parts, rank)
    scale: Tensor  # (adapters,) float32
    outputs: tuple[int, ...]  # outputs of every part

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroups:
    """The rows of a pass by adapter. Group n has the rows `order[first]`, `order[first + 1]`, ..."""

    order: Tensor  # (rows,) int32: the rows that have an adapter, those of one adapter together
    tiles: Tensor  # (groups, 3) int32: adapter, first, number of rows (0: an unused entry)
    tile: int  # upper limit for the rows of a group


class DeviceAdapters:
    """Implements AdapterMemory of engine/paged.py."""

    def __init__(self, model: Any, *, count: int, rank: int) -> None:
        self.count = count
        self.layers: list[dict[str, ProjectionAdapters]] = []
        self._scale = torch.ones(count, dtype=torch.float32, device=model.device)
        self._places: dict[str, tuple[Tensor, Tensor]] = {}
        """By name of a weight: its part of A (adapters, rank, inputs) and of B (adapters, outputs, rank)."""
        for n, block in enumerate(model.model.layers):
            prefix = f"model.layers.{n}."
            self.layers.append({name: self._projection(prefix, block, name, padded_rank(rank)) for name in PROJECTIONS})

    def _projection(self, prefix: str, block: Any, name: str, rank: int) -> ProjectionAdapters:
        parent, parts = PROJECTIONS[name]
        weights = [getattr(getattr(block, parent), part).weight for part in parts]
        outputs, like = [len(w) for w in weights], weights[0].detach()
        a = like.new_zeros(self.count, len(parts) * rank, like.shape[1])
        b = like.new_zeros(self.count, sum(outputs), rank)
        for part, part_a, part_b in zip(parts, a.split(rank, 1), b.split(outputs, 1), strict=True):
            self._places[f"{prefix}{parent}.{part}{WEIGHT}"] = part_a, part_b
        return ProjectionAdapters(a=a, b=b, scale=self._scale, outputs=tuple(outputs))

    def check(self, pairs: Mapping[str, AdapterPair]) -> None:
        unknown = [name for name in pairs if name not in self._places]
        if unknown:
            what = f"an adapter of {unknown[0].removesuffix(WEIGHT)!r} is not supported: it is not a projection"
            raise WindfallError(f"{what} of attention or MLP")

    @torch.no_grad()
    def hold(self, number: int, pairs: Mapping[str, AdapterPair], scale: float) -> None:
        self._scale[number] = scale
        for name, (a, b) in self._places.items():
            a[number].zero_()
            b[number].zero_()
            if name in pairs:
                pair = pairs[name]
                a[number, : len(pair.a)].copy_(pair.a)
                b[number, :, : len(pair.a)].copy_(pair.b)
