"""The adapters of the GPU engine on the device: the matrices of all policies, and which rows of a pass use which.

    [y | h] = x @ [W | A of all adapters].T                 one matrix product, as without adapters, with more outputs
    y += (scale * h of the row's adapter) @ B.T             one kernel
    [y | h] = [W | B of all adapters][token]                embeddings; then y += (scale * h of the row's adapter) @ A

A is stored behind the weight, so its product costs no launch. Each row gets the h of every adapter and uses its own:
that is more than is needed, but little beside the weight (16 adapters of rank 16 add 5 % to the matrices of an 8B
model), and at small batches reading the matrices is what takes time. The kernel works on groups of rows: some rows that
use the same adapter, or none. The logits are large, so those of rows whose adapter does not change the head are not
touched: the head has scales of its own, which are 0 for such adapters.

Rules:
- the tensors are allocated once, for the largest rank and all layers, and never move: captured graphs refer to them;
- the module's parameters become views of the joined tensors, as without adapters (decoder.py);
- a smaller rank is padded with zeros, and so is a layer that an adapter does not change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windfall.errors import WindfallError
from windfall.weights.merged import WEIGHT, AdapterPair
from windfall.weights.one_copy import copy_together

PROJECTIONS = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "out": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
"""The projections of a layer, and the linear layers that each of them joins (decoder.py)."""
HEAD, TOKENS = "lm_head", "model.embed_tokens"
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

    weight: Tensor  # (outputs + adapters * parts * rank, inputs): the weights of all parts, then A of each adapter
    bias: Tensor | None  # (outputs + adapters * parts * rank,)
    b: Tensor  # (adapters, outputs, rank)
    scale: Tensor  # (adapters,) float32
    outputs: tuple[int, ...]  # outputs of every part

    @property
    def rank(self) -> int:
        return self.b.shape[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroups:
    """The rows of a pass by adapter. A group has the rows `order[first]`, `order[first + 1]`, ...; every row is in one
    group."""

    order: Tensor  # (rows,) int32: all rows, those of one adapter together
    tiles: Tensor  # (groups, 3) int32: adapter (their number: none), first, number of rows (0: an unused entry)
    tile: int  # upper limit for the rows of a group


class DeviceAdapters:
    """Implements AdapterMemory of engine/paged.py."""

    def __init__(self, model: Any, *, count: int, rank: int) -> None:
        """The parameters of the module get other storage, one projection after the other."""
        self.count = count
        self.layers: list[dict[str, ProjectionAdapters]] = []
        self._scale = torch.ones(count, dtype=torch.float32, device=model.device)
        self._head_scale = torch.zeros_like(self._scale)
        self._places: dict[str, tuple[Tensor, Tensor]] = {}
        """By name of a weight: its part of A (adapters, rank, inputs) and of B (adapters, outputs, rank)."""
        for n, block in enumerate(model.model.layers):
            prefix = f"model.layers.{n}."
            self.layers.append({name: self._projection(prefix, block, name, padded_rank(rank)) for name in PROJECTIONS})
        self.head = self._joined([HEAD], [model.lm_head], padded_rank(rank), self._head_scale)
        self.embedding = self._embedding(model.model.embed_tokens.weight, padded_rank(rank))
        if model.device.type == "cuda":
            torch.cuda.empty_cache()  # where the weights were

    @torch.no_grad()
    def _projection(self, prefix: str, block: Any, name: str, rank: int) -> ProjectionAdapters:
        parent, parts = PROJECTIONS[name]
        linears = [getattr(getattr(block, parent), part) for part in parts]
        return self._joined([f"{prefix}{parent}.{part}" for part in parts], linears, rank, self._scale)

    @torch.no_grad()
    def _joined(self, names: Sequence[str], linears: Sequence[Any], rank: int, scale: Tensor) -> ProjectionAdapters:
        outputs, more = [len(linear.weight) for linear in linears], self.count * len(linears) * rank
        weight = _extend([linear.weight for linear in linears], more)
        bias = None if linears[0].bias is None else _extend([linear.bias for linear in linears], more)
        a = weight[sum(outputs) :].view(self.count, len(linears) * rank, -1)
        b = weight.new_zeros(self.count, sum(outputs), rank)
        for name, part_a, part_b in zip(names, a.split(rank, 1), b.split(outputs, 1), strict=True):
            self._places[name + WEIGHT] = part_a, part_b
        return ProjectionAdapters(weight=weight, bias=bias, b=b, scale=scale, outputs=tuple(outputs))

    def _embedding(self, weight: Tensor, rank: int) -> ProjectionAdapters:
        """Its `weight` is only h: a row for each token. A takes the place of B, because it comes last."""
        tokens, size = weight.shape
        h, a = weight.new_zeros(tokens, self.count * rank), weight.new_zeros(self.count, size, rank)
        self._places[TOKENS + WEIGHT] = a.transpose(1, 2), h.view(tokens, self.count, rank).transpose(0, 1)
        return ProjectionAdapters(weight=h, bias=None, b=a, scale=self._scale, outputs=(size,))

    def check(self, pairs: Mapping[str, AdapterPair]) -> None:
        unknown = [name for name in pairs if name not in self._places]
        if unknown:
            what = f"an adapter of {unknown[0].removesuffix(WEIGHT)!r} is not supported: it is not a projection"
            raise WindfallError(f"{what} of attention or MLP, nor the head, nor the embedding of tokens")

    @torch.no_grad()
    def hold(self, number: int, pairs: Mapping[str, AdapterPair], scale: float) -> None:
        self._scale[number] = scale
        self._head_scale[number] = scale if HEAD + WEIGHT in pairs else 0.0
        copies = copy_together([t for pair in pairs.values() for t in pair], self._scale.device)
        own = {name: AdapterPair(*pair) for name, *pair in zip(pairs, copies[::2], copies[1::2], strict=True)}
        for name, (a, b) in self._places.items():
            a[number].zero_()
            b[number].zero_()
            if name in own:
                pair = own[name]
                a[number, : len(pair.a)].copy_(pair.a)
                b[number, :, : len(pair.a)].copy_(pair.b)


def _extend(parts: Sequence[Tensor], more: int) -> Tensor:
    """One tensor with all parts and then `more` rows of zeros. The parts stay the same objects and become views."""
    joined = torch.cat([*(p.data for p in parts), parts[0].data.new_zeros(more, *parts[0].shape[1:])])
    for p, view in zip(parts, joined.split([*(len(p) for p in parts), more]), strict=False):
        p.data = view
    return joined
