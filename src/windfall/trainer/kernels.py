# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""What windfall's own layers compute between their matrix products, in Triton, for a GPU: each function reads and
writes every value once. tests/support/engines/plain_layers.py defines them in plain torch. Needs triton to import.

Where the gradient of a weight is a sum over tokens, every program handles several rows in turn and writes its own
partial sum, so that the result does not depend on the order in which programs finish. The backward of log-softmax
overwrites the logits with its result.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def programs(x: Tensor, rows: int, num_warps: int) -> int:
    """The number of programs that run at once: a multiprocessor has room for about 32 warps of these kernels."""
    if not x.is_cuda:  # the Triton interpreter
        return min(rows, 3)
    return min(rows, max(2, 32 // num_warps) * torch.cuda.get_device_properties(x.device).multi_processor_count)


def warps(block: int) -> int:
    """The number of warps of a program for a row of `block` elements."""
    return max(1, min(16, block // 512))


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
    added, options = x if add is None else add.contiguous(), {"BLOCK": block, "num_warps": warps(block)}
    _rms_norm[(len(x),)](x, added, weight, out, total, eps, x.shape[1], HAS_ADD=add is not None, **options)
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
    carried, options = x if carry is None else carry.contiguous(), {"BLOCK": block, "num_warps": warps(block)}
    args = (grad.contiguous(), x, weight, carried, dx, out, partial, rows, eps, width)
    _rms_norm_backward[(count,)](*args, HAS_CARRY=carry is not None, **options)
    return dx, out, partial.sum(0)


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


@triton.jit
def _token_logprobs(LOGITS, TARGETS, OUT, scale, rows, width, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    row = LOGITS + n.to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    maximum = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        x = tl.load(row + start + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
        new_maximum = tl.maximum(maximum, tl.max(x, 0))
        rescale = tl.exp(maximum - new_maximum)
        p = tl.exp(x - new_maximum)
        total = total * rescale + tl.sum(p, 0)
        weighted = weighted * rescale + tl.sum(tl.where(inside, p * x, 0.0), 0)
        maximum = new_maximum
    log_total = tl.log(total)
    target_logit = tl.load(row + tl.load(TARGETS + n)).to(tl.float32) * scale
    tl.store(OUT + n, (target_logit - maximum) - log_total)
    tl.store(OUT + rows + n, log_total - (weighted / total - maximum))
    tl.store(OUT + 2 * rows + n, maximum + log_total)


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    rows, width = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    block = min(4096, triton.next_power_of_2(width))
    _token_logprobs[(rows,)](logits, targets, out, 1.0 / temperature, rows, width, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _token_logprobs_backward(LOGITS, TARGETS, SUMS, WEIGHTS, scale, width, BLOCK: tl.constexpr):
    n, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = LOGITS + n.to(tl.int64) * width + at
    x = tl.load(row, mask=at < width, other=0.0)
    p = tl.exp(x.to(tl.float32) * scale - tl.load(SUMS + n))
    p = tl.where(at == tl.load(TARGETS + n), p - 1.0, p)
    tl.store(row, (p * (tl.load(WEIGHTS + n) * scale)).to(x.dtype), mask=at < width)


def token_logprobs_backward(
    logits: Tensor, targets: Tensor, sums: Tensor, weights: Tensor, temperature: float
) -> Tensor:
    """In place: the gradient overwrites `logits`."""
    rows, width = logits.shape
    block = min(4096, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _token_logprobs_backward[grid](logits, targets, sums, weights, 1.0 / temperature, width, BLOCK=block, num_warps=8)
    return logits


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
