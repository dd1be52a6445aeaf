# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""The norms and the rotary embedding of queries and keys, and their gradients. Each program of the forward kernel
handles all heads of one token, as two blocks of (heads, half of a head). Each program of the backward kernel handles
several tokens in turn."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windfall.trainer.kernels.layers import programs


@triton.jit
def _rotate_heads(
    X,
    W,
    OUT,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    eps,
    N: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS_UP: tl.constexpr,
    HALF_UP: tl.constexpr,
    NORM: tl.constexpr,
):
    """The heads of one token, as two blocks of (heads, half of a head)."""
    half: tl.constexpr = HEAD // 2
    h, d = tl.arange(0, HEADS_UP)[:, None], tl.arange(0, HALF_UP)[None, :]
    inside = (h < N) & (d < half)
    at = h * HEAD + d
    a = tl.load(X + at, mask=inside, other=0.0)
    b = tl.load(X + at + half, mask=inside, other=0.0)
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD + eps))[:, None]
        w_a = tl.load(W + d, mask=d < half, other=0.0).to(tl.float32)
        w_b = tl.load(W + d + half, mask=d < half, other=0.0).to(tl.float32)
        a = ((a * scale).to(dtype).to(tl.float32) * w_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * w_b).to(dtype).to(tl.float32)
    tl.store(OUT + at, (a * cos_a - b * sin_a).to(dtype), mask=inside)
    tl.store(OUT + at + half, (b * cos_b + a * sin_b).to(dtype), mask=inside)


@triton.jit
def _angles(TABLE, t, HEAD: tl.constexpr, HALF_UP: tl.constexpr):
    d = tl.arange(0, HALF_UP)[None, :]
    inside = d < HEAD // 2
    first = tl.load(TABLE + t * HEAD + d, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(TABLE + t * HEAD + HEAD // 2 + d, mask=inside, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _rotary(
    QKV,
    COS,
    SIN,
    QW,
    KW,
    Q,
    K,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS_UP: tl.constexpr,
    KV_UP: tl.constexpr,
    HALF_UP: tl.constexpr,
    NORM: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    cos_a, cos_b = _angles(COS, t, HEAD, HALF_UP)
    sin_a, sin_b = _angles(SIN, t, HEAD, HALF_UP)
    row = QKV + t * (HEADS + 2 * KV) * HEAD
    _rotate_heads(row, QW, Q + t * HEADS * HEAD, cos_a, cos_b, sin_a, sin_b, eps, HEADS, HEAD, HEADS_UP, HALF_UP, NORM)
    row += HEADS * HEAD
    _rotate_heads(row, KW, K + t * KV * HEAD, cos_a, cos_b, sin_a, sin_b, eps, KV, HEAD, KV_UP, HALF_UP, NORM)


def apply_rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    rows, head = cos.shape
    q, k = qkv.new_empty(rows, heads, head), qkv.new_empty(rows, kv_heads, head)
    _rotary[(rows,)](
        qkv, cos, sin, *_pointers(q_norm, k_norm, qkv), q, k, eps, **_shape(heads, kv_heads, head, q_norm), num_warps=4
    )
    return q, k


@triton.jit
def _rotate_heads_backward(
    X,
    W,
    GRAD,
    OUT,
    cos_a,
    cos_b,
    sin_a,
    sin_b,
    eps,
    N: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS_UP: tl.constexpr,
    HALF_UP: tl.constexpr,
    NORM: tl.constexpr,
):
    """Gradients of the heads of one token. Returns each head's part of the norm's weight gradient, in two halves."""
    half: tl.constexpr = HEAD // 2
    h, d = tl.arange(0, HEADS_UP)[:, None], tl.arange(0, HALF_UP)[None, :]
    inside = (h < N) & (d < half)
    at = h * HEAD + d
    g_a = tl.load(GRAD + at, mask=inside, other=0.0)
    g_b = tl.load(GRAD + at + half, mask=inside, other=0.0)
    dtype = g_a.dtype
    g_a, g_b = g_a.to(tl.float32), g_b.to(tl.float32)
    da, db = g_a * cos_a + g_b * sin_b, g_b * cos_b - g_a * sin_a
    dw_a, dw_b = tl.zeros((HEADS_UP, HALF_UP), tl.float32), tl.zeros((HEADS_UP, HALF_UP), tl.float32)
    if NORM:
        a = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(X + at + half, mask=inside, other=0.0).to(tl.float32)
        scale = (1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD + eps))[:, None]
        a, b = a * scale, b * scale
        dw_a, dw_b = da * a.to(dtype).to(tl.float32), db * b.to(dtype).to(tl.float32)
        da *= tl.load(W + d, mask=d < half, other=0.0).to(tl.float32)
        db *= tl.load(W + d + half, mask=d < half, other=0.0).to(tl.float32)
        mean = ((tl.sum(da * a, 1) + tl.sum(db * b, 1)) / HEAD)[:, None]
        da, db = scale * (da - a * mean), scale * (db - b * mean)
    tl.store(OUT + at, da.to(dtype), mask=inside)
    tl.store(OUT + at + half, db.to(dtype), mask=inside)
    return dw_a, dw_b


@triton.jit
def _rotary_backward(
    DQ,
    DK,
    DV,
    QKV,
    COS,
    SIN,
    QW,
    KW,
    OUT,
    DQW,
    DKW,
    rows,
    eps,
    HEADS: tl.constexpr,
    KV: tl.constexpr,
    HEAD: tl.constexpr,
    HEADS_UP: tl.constexpr,
    KV_UP: tl.constexpr,
    HALF_UP: tl.constexpr,
    NORM: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64)
    # Summed over heads only at the end, because a sum across warps is slow.
    qa, qb = tl.zeros((HEADS_UP, HALF_UP), tl.float32), tl.zeros((HEADS_UP, HALF_UP), tl.float32)
    ka, kb = tl.zeros((KV_UP, HALF_UP), tl.float32), tl.zeros((KV_UP, HALF_UP), tl.float32)
    flat = tl.arange(0, 2 * KV_UP * HALF_UP)
    for t in range(first, rows, tl.num_programs(0)):
        cos_a, cos_b = _angles(COS, t, HEAD, HALF_UP)
        sin_a, sin_b = _angles(SIN, t, HEAD, HALF_UP)
        row = t * (HEADS + 2 * KV) * HEAD
        x, grad, to = QKV + row, DQ + t * HEADS * HEAD, OUT + row
        a, b = _rotate_heads_backward(
            x, QW, grad, to, cos_a, cos_b, sin_a, sin_b, eps, HEADS, HEAD, HEADS_UP, HALF_UP, NORM
        )
        qa += a
        qb += b
        row += HEADS * HEAD
        x, grad, to = QKV + row, DK + t * KV * HEAD, OUT + row
        a, b = _rotate_heads_backward(x, KW, grad, to, cos_a, cos_b, sin_a, sin_b, eps, KV, HEAD, KV_UP, HALF_UP, NORM)
        ka += a
        kb += b
        dv = tl.load(DV + t * KV * HEAD + flat, mask=flat < KV * HEAD, other=0.0)
        tl.store(OUT + row + KV * HEAD + flat, dv, mask=flat < KV * HEAD)
    if NORM:
        d = tl.arange(0, HALF_UP)
        inside = d < HEAD // 2
        tl.store(DQW + first * HEAD + d, tl.sum(qa, 0), mask=inside)
        tl.store(DQW + first * HEAD + HEAD // 2 + d, tl.sum(qb, 0), mask=inside)
        tl.store(DKW + first * HEAD + d, tl.sum(ka, 0), mask=inside)
        tl.store(DKW + first * HEAD + HEAD // 2 + d, tl.sum(kb, 0), mask=inside)


def apply_rotary_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, head = cos.shape
    count = programs(qkv, rows, 4)
    partial = torch.empty(2, count if q_norm is not None else 0, head, dtype=torch.float32, device=qkv.device)
    out = torch.empty_like(qkv)
    grads, norms = (dq.contiguous(), dk.contiguous(), dv.contiguous()), _pointers(q_norm, k_norm, qkv)
    args = (*grads, qkv, cos, sin, *norms, out, partial[0], partial[1], rows, eps)
    _rotary_backward[(count,)](*args, **_shape(heads, kv_heads, head, q_norm), num_warps=4)
    if q_norm is None:
        return out, None, None
    return out, partial[0].sum(0), partial[1].sum(0)


def _pointers(q_norm: Tensor | None, k_norm: Tensor | None, other: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of the norms. A kernel needs a valid pointer even if it does not read it."""
    return (other if q_norm is None else q_norm), (other if k_norm is None else k_norm)


def _shape(heads: int, kv_heads: int, head: int, q_norm: Tensor | None) -> dict[str, Any]:
    up = triton.next_power_of_2
    return {
        "HEADS": heads,
        "KV": kv_heads,
        "HEAD": head,
        "HEADS_UP": up(heads),
        "KV_UP": up(kv_heads),
        "HALF_UP": up(head // 2),
        "NORM": q_norm is not None,
    }
