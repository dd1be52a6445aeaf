"""Linear layers on an x86-64 CPU, for the batches of decode steps, with copies of their weights in a suitable layout.

torch keeps a weight as (out, in), and a library for matrix products brings it into another layout in every call. For
few rows this takes as long as the product. So large weights are copied once into oneDNN's own layout, and small ones,
where a call of oneDNN takes longer than it saves, as (in, out). docs/engine.md has figures.

The copies take as much memory as the weights. Layers use them only inside the `with` block, so a trainer that shares
the module computes with its own weights. They do not follow the module: drop them when its weights change.
"""

from __future__ import annotations

import functools
import platform
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

LARGE = 1 << 19
"""Elements from which a weight is in oneDNN's layout."""
ROWS = range(3, 129)
"""Batches for which the copies are faster. Others are computed with the weights themselves."""
TYPICAL_ROWS = 32
"""Rows for which oneDNN chooses its layout."""


class PrepackedLinears:
    def __init__(self, model: Any) -> None:
        self._layers = [m for m in model.modules() if type(m) is torch.nn.Linear and _gains(m.weight)]
        self._forwards: list[Any] | None = None

    def drop(self) -> None:
        """Free the copies. The next `with` block makes them anew."""
        self._forwards = None

    def __enter__(self) -> None:
        if self._forwards is None:
            self._forwards = [_pack(layer) for layer in self._layers]
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.__dict__["forward"]


def _gains(weight: Tensor) -> bool:
    """The same in all processes of a run: copies change the rounding."""
    onednn: Any = torch.backends.mkldnn
    usable = platform.machine() == "x86_64" and onednn.is_available() and onednn.enabled
    return usable and weight.device.type == "cpu" and weight.dtype == torch.float32


def _pack(layer: torch.nn.Linear) -> Any:
    weight = layer.weight.detach()
    if weight.numel() >= LARGE:
        return functools.partial(_onednn, layer, torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS))
    return functools.partial(_transposed, layer, weight.t().contiguous())


def _onednn(layer: torch.nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() // x.shape[-1] not in ROWS:
        return linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")


def _transposed(layer: torch.nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() // x.shape[-1] not in ROWS:
        return linear(x, layer.weight, layer.bias)
    out = torch.matmul(x, packed)
    return out if layer.bias is None else out.add_(layer.bias)
