# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""RMSNorm, SwiGLU, and log-softmax with gather, and their gradients. A program of RMSNorm's backward kernel handles
several rows in turn. The forward of log-softmax reads the logits once; its backward overwrites them with its result."""

from __future__ import annotations

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
