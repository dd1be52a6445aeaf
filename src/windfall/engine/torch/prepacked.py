"""Linear layers on an x86-64 CPU, for the batches of decode steps, with copies of their weights in a suitable layout.

torch keeps a weight as (out, in), and a library for matrix products brings it into another layout in every call. For
few rows this takes as long as the product. So large weights are copied once into oneDNN's own layout, and small ones,
where a call of oneDNN takes longer than it saves, as (in, out). docs/engine.md has figures.

The copies take as much memory as the weights. Layers use them only inside the `with` block and in its thread, so a
trainer or another engine that shares the module computes with its own weights. The copies do not follow the module:
drop them when its weights change.
"""

from __future__ import annotations

import functools
import platform
import threading
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


_thread = threading.local()
"""`forwards`: by layer, the forward functions with copies, while the thread is inside a block."""
_blocks_change = threading.Lock()


class PrepackedLinears:
    def __init__(self, model: Any) -> None:
        self._layers = [m for m in model.modules() if type(m) is torch.nn.Linear and _gains(m.weight)]
        self._forwards: dict[torch.nn.Linear, Any] | None = None

    def drop(self) -> None:
        """Free the copies. The next `with` block makes them anew."""
        self._forwards = None

    def __enter__(self) -> None:
        if self._forwards is None:
            self._forwards = {layer: _pack(layer) for layer in self._layers}
        _thread.forwards = self._forwards
        with _blocks_change:
            for layer in self._layers:
                layer.__dict__.setdefault("forward", _Forward(layer)).blocks += 1

    def __exit__(self, *_: object) -> None:
        _thread.forwards = {}
        with _blocks_change:
            for layer in self._layers:
                layer.__dict__["forward"].blocks -= 1
                if not layer.__dict__["forward"].blocks:
                    del layer.__dict__["forward"]


class _Forward:
    """Replaces a layer's forward function while any thread is inside a block with this layer."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        self._layer = layer
        self.blocks = 0

    def __call__(self, x: Tensor) -> Tensor:
        forward = getattr(_thread, "forwards", {}).get(self._layer)
        return linear(x, self._layer.weight, self._layer.bias) if forward is None else forward(x)


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
