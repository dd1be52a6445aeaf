# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""The MLP's gate and its gradient. A program has a part of one token's row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gate(BOTH, OUT, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(BOTH + row * 2 * width + at, mask=inside, other=0.0)
    u = tl.load(BOTH + row * 2 * width + width + at, mask=inside, other=0.0)
    f = g.to(tl.float32)
    opened = (f * tl.sigmoid(f)).to(g.dtype).to(tl.float32)
    tl.store(OUT + row * width + at, (opened * u.to(tl.float32)).to(g.dtype), mask=inside)


def gate(both: Tensor) -> Tensor:
    rows, width = len(both), both.shape[1] // 2
    out = both.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    _gate[(rows, triton.cdiv(width, block))](both, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _gate_back(GRAD, BOTH, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    left, right = BOTH + row * 2 * width + at, BOTH + row * 2 * width + width + at
    g = tl.load(left, mask=inside, other=0.0)
    u = tl.load(right, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
    kind = g.dtype
    f = g.to(tl.float32)
    s = tl.sigmoid(f)
    tl.store(left, (d * u * s * (1.0 + f * (1.0 - s))).to(kind), mask=inside)
    tl.store(right, (d * f * s).to(kind), mask=inside)
    tl.store(GRAD + row * width + at, ((f * s).to(kind).to(tl.float32) * u).to(kind), mask=inside)


def gate_back(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """In place: `both` becomes its gradient, `grad` the gated product."""
    rows, width = grad.shape
    assert grad.is_contiguous() and both.is_contiguous()
    block = min(1024, triton.next_power_of_2(width))
    _gate_back[(rows, triton.cdiv(width, block))](grad, both, width, BLOCK=block, num_warps=4)
    return both, grad
