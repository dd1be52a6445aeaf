"""Where the gradients of the weights go: into float32 sums, whatever the dtype of the weights.

Unsharded, the sum of a weight is its `grad`. Code that computes a gradient adds it there directly; autograd
casts its gradients and adds them there, too. The sums of half precision weights are parts of one long tensor: matrices
come first, in the order of the model, so that those with the same input (query, key and value; gate and up) are
adjacent and their gradient is one matrix product.

Sharded by FSDP2, a weight exists as a whole only during its part of a pass. Its gradient is returned to autograd;
FSDP2 sums it over the ranks and adds the rows of this rank to the `grad` of the sharded parameter.

Adapters are never split. With several ranks, their sums are one long tensor, which is added up over the ranks before
an update (optimizer.py).

A module with the adapters of several policies has a `Gradients` for each: zero, divide and step are per policy. In a
pass, the sum of a weight is found by the weight, so any of them will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from windfall.engine.module_weights import adjacent


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    """The weights of a model that require gradients, by name."""
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


class Gradients:
    def __init__(self, weights: Mapping[str, Tensor], *, together: bool = False) -> None:
        """`weights`: those that are trained (`trained`). Of a sharded model, as they are between passes. `together`:
        other ranks make the same passes, so every pass runs backward, even if its loss has no gradient."""
        self.weights = weights
        self.sharded = any(isinstance(p, DTensor) for p in self.weights.values())
        self.together = together or self.sharded
        flat = [p for p in self.weights.values() if self.together or p.dtype != torch.float32]
        flat = [] if self.sharded else sorted(flat, key=lambda p: p.dim() < 2)
        lengths = [_aligned(p.numel()) for p in flat]
        self._flat = torch.zeros(sum(lengths), device=flat[0].device) if flat else None
        self._others = [p for p in weights.values() if p.dtype == torch.float32 and not self.together]
        """Unsharded weights whose sums are tensors of their own."""
        self._joined: dict[tuple[int, ...], Tensor | None] = {}
        """Joined sums of half precision weights, by their ids: a cache, because the check for adjacency is slow."""
        accept_float32(flat)
        for p, part in zip(flat, self._flat.split(lengths) if self._flat is not None else (), strict=True):
            p.grad = part[: p.numel()].view(p.shape)

    def of(self, p: Tensor) -> Tensor | None:
        """The accumulated sum of a weight; None for a weight that is not trained, or sharded and without a gradient."""
        if p.requires_grad and p.grad is None and not self.sharded:
            p.grad = torch.zeros_like(p, dtype=torch.float32)
        grad = p.grad if p.requires_grad else None
        return grad.to_local() if isinstance(grad, DTensor) else grad

    def zero(self) -> None:
        if self._flat is not None:
            self._flat.zero_()
        for p in self._others:
            if p.grad is not None:
                p.grad.zero_()
        for p in self.weights.values() if self.sharded else ():
            p.grad = None

    def all(self) -> list[Tensor]:
        """All sums of unsharded weights, in a few tensors. Each is short enough for kernels with 32-bit indices."""
        own = [p.grad for p in self._others if p.grad is not None]
        return own if self._flat is None else [*self._flat.split(1 << 30), *own]

    # Each of the following is for a weight as it is during a pass. It returns what to return to autograd.

    def total(self, p: Tensor) -> Tensor | None:
        """A float32 tensor to add a gradient to, which is then passed to `returned`. None if `p` is not trained."""
        if self.sharded and p.requires_grad:
            return torch.zeros(p.shape, device=p.device)
        return self.of(p)

    def returned(self, total: Tensor | None) -> Tensor | None:
        return total if self.sharded else None

    def add(self, p: Tensor, value: Tensor) -> Tensor | None:
        if self.sharded:
            return value if p.requires_grad else None
        total = self.of(p)
        if total is not None:
            total.add_(value)
        return None

    def add_rows(self, p: Tensor, rows: Tensor, values: Tensor) -> Tensor | None:
        """Add `values[i]` to row `rows[i]` of an embedding's gradient."""
        total = self.total(p)
        if total is not None:
            total.index_add_(0, rows, values.float())
        return self.returned(total)

    def product(self, parts: Sequence[Tensor], grad: Tensor, x: Tensor) -> list[Tensor | None]:
        """Add grad.T @ x to the gradient of W, where y = x @ W.T, `grad` is that of y, and W joins `parts`."""
        trained = all(p.requires_grad for p in parts)
        if self.sharded and trained:
            return list(_product(grad, x).split([len(p) for p in parts]))
        joined = self._joined_sum(parts) if trained and parts[0].dtype != torch.float32 else None
        if joined is not None:
            add_product(joined, grad, x)
            return [None] * len(parts)
        totals = [self.total(p) for p in parts]
        for total, part in zip(totals, grad.split([len(p) for p in parts], 1), strict=True):
            if total is not None:
                add_product(total, part, x)
        return [self.returned(total) for total in totals]

    def _joined_sum(self, parts: Sequence[Tensor]) -> Tensor | None:
        if len(parts) == 1:  # adapters, which may come and go: another one may get its id
            return self.of(parts[0])
        key = tuple(map(id, parts))
        if key not in self._joined:
            self._joined[key] = adjacent([g for g in map(self.of, parts) if g is not None])
        return self._joined[key]


def accept_float32(weights: Iterable[Tensor]) -> None:
    """Let these weights have gradients in float32. Skips sharded parameters, which are float32 themselves."""
    for p in weights:
        if p.requires_grad and not isinstance(p, DTensor) and p.grad_dtype != torch.float32:
            p.grad_dtype = torch.float32


def add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad.T @ x to a float32 sum."""
    if grad.dtype == total.dtype:
        total.addmm_(grad.t(), x)
    elif _adds_in_float32(grad.device, grad.dtype):
        torch.ops.aten.addmm.dtype_out(total, grad.t(), x, torch.float32, out=total)
    else:
        total.add_(grad.t() @ x)


def _product(grad: Tensor, x: Tensor) -> Tensor:
    """grad.T @ x, without rounding to half precision where the device supports it."""
    if grad.dtype != torch.float32 and _adds_in_float32(grad.device, grad.dtype):
        return torch.ops.aten.mm.dtype(grad.t(), x, torch.float32)
    return grad.t() @ x


@cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether half precision products can have float32 results, and be added to a float32 sum in one operation."""
    if device.type != "cuda" or not hasattr(torch.ops.aten.addmm, "dtype_out"):
        return False
    a, total = torch.full((16, 16), 0.25, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.ops.aten.addmm.dtype_out(total, a.t(), a, torch.float32, out=total)
        total.add_(torch.ops.aten.mm.dtype(a.t(), a, torch.float32))
    except RuntimeError:  # not supported by this build of torch, or on this GPU
        return False
    return bool((total == 3.0).all())


def _aligned(numbers: int) -> int:
    """Round up to a multiple of 16 bytes, so that every part starts at an address where matrix products are fast."""
    return -(-numbers // 4) * 4
