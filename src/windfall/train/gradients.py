"""Accumulates gradients in float32, one sum per weight. The code that computes a gradient adds it to the sum directly.

The sum of a float32 weight is its `grad`. The sum of a bfloat16 weight is a part of one long float32 tensor. Matrices
come first in that tensor, in the order of the model, so that those with the same input (query, key and value; gate and
up) are adjacent and their gradient is one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from windfall.engine.joined_weights import adjacent


class Gradients:
    def __init__(self, model: Any) -> None:
        self.weights: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        half = sorted((p for p in self.weights.values() if p.dtype != torch.float32), key=lambda p: p.dim() < 2)
        lengths = [_aligned(p.numel()) for p in half]
        self._flat = torch.zeros(sum(lengths), device=half[0].device) if half else None
        self._sums: dict[int, Tensor] = {}
        self._joined: dict[tuple[int, ...], Tensor | None] = {}
        """Joined sums of half precision weights, by their ids: a cache, because the check for adjacency is slow."""
        for p, part in zip(half, self._flat.split(lengths) if self._flat is not None else (), strict=True):
            self._sums[id(p)] = part[: p.numel()].view(p.shape)
            p.register_post_accumulate_grad_hook(self._add_autograd)  # pyright: ignore[reportArgumentType]

    def of(self, p: Tensor) -> Tensor | None:
        """The accumulated sum of a weight, which may be added to; None for a weight that is not trained."""
        if not p.requires_grad:
            return None
        if p.dtype == torch.float32 and p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad if p.dtype == torch.float32 else self._sums[id(p)]

    def zero(self) -> None:
        if self._flat is not None:
            self._flat.zero_()
        for p in self.weights.values():
            if p.grad is not None:
                p.grad.zero_()

    def all(self) -> list[Tensor]:
        """All sums, in a few tensors. Each is short enough for kernels with 32-bit indices."""
        own = [p.grad for p in self.weights.values() if p.dtype == torch.float32 and p.grad is not None]
        return own if self._flat is None else [*self._flat.split(1 << 30), *own]

    def add(self, p: Tensor, value: Tensor) -> None:
        grad = self.of(p)
        if grad is not None:
            grad.add_(value)

    def add_rows(self, p: Tensor, rows: Tensor, values: Tensor) -> None:
        """Add `values[i]` to row `rows[i]` of an embedding's gradient."""
        grad = self.of(p)
        if grad is not None:
            grad.index_add_(0, rows, values.float())

    def add_product(self, parts: Sequence[Tensor], grad: Tensor, x: Tensor) -> None:
        """Add grad.T @ x to the gradient of W, where y = x @ W.T, `grad` is that of y, and W joins `parts`."""
        joined = self._joined_sum(parts) if all(p.requires_grad for p in parts) else None
        if joined is not None:
            _add_product(joined, grad, x)
            return
        start = 0
        for p in parts:
            s = self.of(p)
            if s is not None:
                _add_product(s, grad[:, start : start + len(p)], x)
            start += len(p)

    def _joined_sum(self, parts: Sequence[Tensor]) -> Tensor | None:
        if parts[0].dtype == torch.float32:
            return adjacent([g for g in map(self.of, parts) if g is not None])
        key = tuple(map(id, parts))
        if key not in self._joined:
            self._joined[key] = adjacent([self._sums[i] for i in key])
        return self._joined[key]

    def _add_autograd(self, p: Tensor) -> None:
        """Add a new gradient from autograd to the sum, and free it."""
        assert p.grad is not None
        self._sums[id(p)].add_(p.grad)
        p.grad = None


def _aligned(numbers: int) -> int:
    """Round up to a multiple of 16 bytes, so that every part starts at an address where matrix products are fast."""
    return -(-numbers // 4) * 4


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), x)
    elif _adds_in_float32(grad.device, grad.dtype):
        torch.ops.aten.addmm.dtype_out(total, grad.t(), x, torch.float32, out=total)
    else:
        total.add_(grad.t() @ x)


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a half precision product can be added to a float32 sum in one operation, without rounding in between."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    a, total = torch.full((16, 16), 0.25, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a.t(), a, torch.float32, out=total)
    except RuntimeError:  # not supported by this build of torch, or on this GPU
        return False
    return bool((total == 2.0).all())
