"""Linear layers on a CPU with weights in oneDNN's own layout, in which it multiplies small batches faster.

torch keeps weights in rows, and a library for matrix products brings them into another layout in every call. Prepacked
weights are copies that are in this layout already, so they take as much memory as the weights again. Layers use them
only inside the `with` block, so a trainer that shares the module trains its own weights. They do not follow the module:
drop them when its weights change.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

MIN_ELEMENTS = 1 << 17
"""Smaller weights are not packed: a call of oneDNN takes longer than it saves."""
ROWS = 32
"""Rows of the batch for which the layout is chosen. Others are computed with it, too."""


class PrepackedLinears:
    def __init__(self, model: Any) -> None:
        self._layers = [m for m in model.modules() if type(m) is torch.nn.Linear and _gains(m.weight)]
        self._forwards: list[Any] | None = None

    def drop(self) -> None:
        """Free the copies. The next `with` block makes them anew."""
        self._forwards = None

    def __enter__(self) -> None:
        if self._forwards is None:
            packs = (torch.ops.mkldnn._reorder_linear_weight(m.weight.detach(), ROWS) for m in self._layers)
            self._forwards = [functools.partial(_forward, m, p) for m, p in zip(self._layers, packs, strict=True)]
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.__dict__["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for layer in self._layers:
            del layer.__dict__["forward"]


def _gains(weight: Tensor) -> bool:
    """Whether oneDNN is used for this weight and is faster with a packed one. Processes of a run must agree on this."""
    on = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled  # pyright: ignore[reportAttributeAccessIssue]
    return on and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_ELEMENTS


def _forward(layer: torch.nn.Linear, packed: Tensor, x: Tensor) -> Tensor:
    if x.numel() == x.shape[-1]:  # one row: there is nothing to bring into another layout
        return linear(x, layer.weight, layer.bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, "none", [], "")
