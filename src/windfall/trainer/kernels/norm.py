# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""RMSNorm and its gradient. A program of the backward kernel handles several rows in turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.trainer.kernels.launch import programs, warps


@triton.jit
def _rms_norm(X, ADD, W, OUT, SUM, eps, width, HAS_ADD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(X + row + at, mask=inside, other=0.0)
    if HAS_ADD:
        residual = tl.load(ADD + row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(SUM + row + at, x, mask=inside)
    f = x.to(tl.float32)
    unit = f * (1.0 / tl.sqrt(tl.sum(f * f, 0) / width + eps))
    w = tl.load(W + at, mask=inside, other=0.0)
    tl.store(OUT + row + at, (unit.to(x.dtype).to(tl.float32) * w.to(tl.float32)).to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out, total = torch.empty_like(x), x if add is None else torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _rms_norm[(len(x),)](
        x,
        x if add is None else add.contiguous(),
        weight,
        out,
        total,
        eps,
        x.shape[1],
        HAS_ADD=add is not None,
        BLOCK=block,
        num_warps=warps(block),
    )
    return out, total


@triton.jit
def _rms_norm_backward(GRAD, X, W, CARRY, DX, OUT, DW, rows, eps, width, HAS_CARRY: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    w = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(first, rows, tl.num_programs(0)):
        row = n * width
        x = tl.load(X + row + at, mask=inside, other=0.0)
        g = tl.load(GRAD + row + at, mask=inside, other=0.0).to(tl.float32)
        f = x.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(f * f, 0) / width + eps)
        unit = f * scale
        rounded = unit.to(x.dtype).to(tl.float32)
        tl.store(OUT + row + at, (rounded * w).to(x.dtype), mask=inside)
        total += g * rounded
        dx = scale * (g * w - unit * (tl.sum(g * w * unit, 0) / width))
        if HAS_CARRY:
            dx += tl.load(CARRY + row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + row + at, dx.to(x.dtype), mask=inside)
    tl.store(DW + first * width + at, total, mask=inside)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carry: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, width = x.shape
    dx, out = torch.empty_like(x), torch.empty_like(x)
    block = triton.next_power_of_2(width)
    count = programs(x, rows, warps(block))
    partial = torch.empty(count, width, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(count,)](
        grad.contiguous(),
        x,
        weight,
        x if carry is None else carry.contiguous(),
        dx,
        out,
        partial,
        rows,
        eps,
        width,
        HAS_CARRY=carry is not None,
        BLOCK=block,
        num_warps=warps(block),
    )
    return dx, out, partial.sum(0)
