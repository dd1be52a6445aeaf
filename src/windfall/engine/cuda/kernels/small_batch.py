# pyright: reportMissingImports=false, reportIndexIssue=false
"""Matrix products of a decode step with few rows, each with what comes before and after it in one kernel.

With few rows a kernel takes little longer than its launch, and reading weights is all there is to do. So a layer has
five kernels instead of eight: the norm is part of the product that reads it, SwiGLU and the sum with the residual are
part of the product before them. And because weights depend on nothing, every kernel lets the next one start early, and
brings its weights into the L2 while the kernel before it still runs.

Rules: as in layers.py; sums are over all columns in one order, whatever the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from windfall.engine.cuda.kernels import launch

SMALL_ROWS = 16
"""Largest number of rows for which these kernels are used: one tile of a matrix product."""
_LINE = tl.constexpr(128)  # bytes that are prefetched at once


@triton.jit
def _prefetch(WEIGHT, n, valid, K: tl.constexpr):
    """Bring rows `n` of the weights (N, K) into the L2."""
    step: tl.constexpr = _LINE // (WEIGHT.dtype.element_ty.primitive_bitwidth // 8)
    lines: tl.constexpr = triton.next_power_of_2((K + step - 1) // step)
    i = tl.arange(0, lines)[None, :] * step
    at = WEIGHT + n.to(tl.int64)[:, None] * K + tl.where(valid[:, None] & (i < K), i, 0)
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["rows"])
def _small_linear(
    X, WEIGHT, BIAS, NORM_WEIGHT, RESIDUAL, OUT, rows, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BIASED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program computes `BLOCK_N` columns of the result for all rows."""
    dtype: tl.constexpr = X.dtype.element_ty
    m, k = tl.arange(0, ROWS_P), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if PDL:
        gdc_launch_dependents()
        _prefetch(WEIGHT, tl.where(n < N, n, 0), n < N, K)
        if GATED:
            _prefetch(WEIGHT, tl.where(n < N, n + N, 0), n < N, K)
        gdc_wait()
    real, own = (m < rows)[:, None], (n < N)[:, None]
    x_at, w_at = m[:, None] * K + k[None, :], n.to(tl.int64)[:, None] * K + k[None, :]
    factor = tl.zeros([ROWS_P, 1], tl.float32)
    if NORM:
        squares = tl.zeros([ROWS_P], tl.float32)
        for first in range(0, K, BLOCK_K):
            x = tl.load(X + x_at + first, mask=real & (first + k < K)[None, :], other=0.0).to(tl.float32)
            squares += tl.sum(x * x, 1)
        factor = tl.rsqrt(squares / K + eps)[:, None]
    acc = tl.zeros([ROWS_P, BLOCK_N], tl.float32)
    up = tl.zeros([ROWS_P, BLOCK_N], tl.float32)
    for first in range(0, K, BLOCK_K):
        inside = (first + k < K)[None, :]
        x = tl.load(X + x_at + first, mask=real & inside, other=0.0)
        if NORM:
            weight = tl.load(NORM_WEIGHT + first + k[None, :], mask=inside, other=0.0).to(tl.float32)
            x = ((x.to(tl.float32) * factor).to(dtype).to(tl.float32) * weight).to(dtype)
        w = tl.load(WEIGHT + w_at + first, mask=own & inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            w = tl.load(WEIGHT + N * K + w_at + first, mask=own & inside, other=0.0)
            up = tl.dot(x, tl.trans(w), up, input_precision="ieee")
    if BIASED:
        acc += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(BIAS + N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    value = acc.to(dtype).to(tl.float32)
    if GATED:
        value = (value / (1.0 + tl.exp(-value))).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    at, valid = m[:, None] * N + n[None, :], real & (n < N)[None, :]
    if ADD:
        value += tl.load(RESIDUAL + at, mask=valid, other=0.0).to(tl.float32)
    tl.store(OUT + at, value.to(dtype), mask=valid)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, norm: Tensor | None = None, eps: float = 0.0,
    residual: Tensor | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    rows, columns = len(x), len(weight) // 2 if gated else len(weight)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    wide = x.dtype.itemsize > 2
    block_n = 16 if gated or columns < 8192 else 32
    _small_linear[(triton.cdiv(columns, block_n),)](
        x, weight, weight if bias is None else bias, x if norm is None else norm, x if residual is None else residual,
        out, rows, eps, N=columns, K=x.shape[1], ROWS_P=SMALL_ROWS, BLOCK_N=block_n, BLOCK_K=64 if wide else 256,
        NORM=norm is not None, GATED=gated, ADD=residual is not None, BIASED=bias is not None, num_warps=4,
        num_stages=2 if wide else 3, **launch.options(),
    )  # fmt: skip
    return out


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer of the RMSNorm of `x`."""
    return _launch(x, weight, bias, norm=norm, eps=eps)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
    """SwiGLU of the linear layer (gate, up) of the RMSNorm of `x`."""
    return _launch(x, weight, bias, norm=norm, eps=eps, gated=True)


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """The sum of the linear layer of `x` and `residual`."""
    return _launch(x, weight, bias, residual=residual)
