"""Linear layers with the same input as one product, with their adapters, forward and backward.

    y = x @ W.T + bias                      W joins the weights of all layers
    y_i += scale * (x @ A_i.T) @ B_i.T      for every layer i with an adapter (lora.py); y_i are its columns of y

A frozen weight costs no product in the backward pass: only the gradients of x and of trained weights are computed. What
an adapter needs of the forward pass, x @ A.T, is recomputed from x: it is narrow, so it costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from windfall.engine.module_weights import adjacent, join
from windfall.trainer.model.gradients import Gradients
from windfall.trainer.model.lora import LoraLinear
from windfall.weights.merged import AdapterPair


class Projection:
    """The weights as they are now. They are joined in a view if they are adjacent in memory, otherwise in a copy."""

    def __init__(self, *layers: Any) -> None:
        self._layers = layers
        self.parts, self.bias_parts = _weights(layers)
        self.copied = False
        self.weight = self._joined(self.parts)
        self.bias = self._joined(self.bias_parts) if self.bias_parts else None
        sizes = [len(p) for p in self.parts]
        self._adapted = [
            (layer, slice(sum(sizes[:i]), sum(sizes[: i + 1])))
            for i, layer in enumerate(layers)
            if isinstance(layer, LoraLinear)
        ]
        self._at = self._addresses()

    def __call__(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        for (a, b), scale, columns in self.adapters:
            y[:, columns].addmm_(linear(x, a), b.t(), alpha=scale)
        return y

    def input_grad(self, dy: Tensor) -> Tensor:
        dx = dy @ self.weight
        for (a, b), scale, columns in self.adapters:
            dx.addmm_(dy[:, columns] @ b, a, alpha=scale)
        return dx

    def weight_grads(self, dy: Tensor, x: Tensor, sums: Gradients) -> list[Tensor | None]:
        """What to return to autograd for each of `weights`."""
        out = sums.product(self.parts, dy, x)
        if any(p.requires_grad for p in self.bias_parts):
            found = dy.sum(0, dtype=torch.float32).split([len(p) for p in self.bias_parts])
            out += [sums.add(p, g) for p, g in zip(self.bias_parts, found, strict=True)]
        else:
            out += [None] * len(self.bias_parts)
        for (a, b), scale, columns in self.adapters:
            part = dy[:, columns]
            out += sums.product([a], scale * (part @ b), x)
            out += sums.product([b], part, scale * linear(x, a))
        return out

    @property
    def adapters(self) -> list[tuple[AdapterPair, float, slice]]:
        """The adapters that have an effect now, with their scales and columns of the output."""
        return [(*found, columns) for layer, columns in self._adapted if (found := layer.adapter) is not None]

    @property
    def weights(self) -> list[Tensor]:
        """All weights that the output depends on."""
        adapters = (t for pair, _, _ in self.adapters for t in pair)
        return [*self.parts, *self.bias_parts, *adapters]

    def valid(self) -> bool:
        """Whether the joined weights are still those of the layers."""
        return not self.copied and self._at == self._addresses()

    def _joined(self, parts: list[Tensor]) -> Tensor:
        view = adjacent(parts)
        self.copied |= view is None
        return torch.cat([p.detach() for p in parts]) if view is None else view

    def _addresses(self) -> list[int]:
        return [p.data_ptr() for parts in _weights(self._layers) for p in parts]


def make_adjacent(*layers: Any) -> None:
    """Move the weights of these layers next to each other in memory, unless FSDP2 has split them."""
    for parts in _weights(layers):
        if parts and not isinstance(parts[0], DTensor):
            join(parts)


def _weights(layers: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices, and the biases, if any."""
    return [x.weight for x in layers], [x.bias for x in layers if x.bias is not None]
