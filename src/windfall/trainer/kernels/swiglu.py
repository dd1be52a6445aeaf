# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""SwiGLU, the activation of the MLP, and its gradient. A program handles a part of the row of one token."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _swiglu(GATE_UP, OUT, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(GATE_UP + row * 2 * width + at, mask=inside, other=0.0)
    u = tl.load(GATE_UP + row * 2 * width + width + at, mask=inside, other=0.0)
    f = g.to(tl.float32)
    activated = (f * tl.sigmoid(f)).to(g.dtype).to(tl.float32)
    tl.store(OUT + row * width + at, (activated * u.to(tl.float32)).to(g.dtype), mask=inside)


def apply_swiglu(gate_up: Tensor) -> Tensor:
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(2048, triton.next_power_of_2(width))
    _swiglu[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _swiglu_backward(GRAD, GATE_UP, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate_at, up_at = GATE_UP + row * 2 * width + at, GATE_UP + row * 2 * width + width + at
    g = tl.load(gate_at, mask=inside, other=0.0)
    u = tl.load(up_at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
    dtype = g.dtype
    f = g.to(tl.float32)
    s = tl.sigmoid(f)
    tl.store(gate_at, (d * u * s * (1.0 + f * (1.0 - s))).to(dtype), mask=inside)
    tl.store(up_at, (d * f * s).to(dtype), mask=inside)
    tl.store(GRAD + row * width + at, ((f * s).to(dtype).to(tl.float32) * u).to(dtype), mask=inside)


def apply_swiglu_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """In place: the gradient overwrites `gate_up`, and the recomputed output overwrites `grad`."""
    rows, width = grad.shape
    assert grad.is_contiguous() and gate_up.is_contiguous()
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_backward[(rows, triton.cdiv(width, block))](grad, gate_up, width, BLOCK=block, num_warps=4)
    return gate_up, grad
