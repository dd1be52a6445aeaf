# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""Log-probs of given tokens out of logits, and the gradient. Logits are read once for the first; the second writes its
result over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _score(LOGITS, TARGETS, OUT, scale, rows, width, BLOCK: tl.constexpr):
    n = tl.program_id(0)
    row = LOGITS + n.to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + at < width
        x = tl.load(row + start + at, mask=inside, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(top, tl.max(x, 0))
        keep = tl.exp(top - higher)
        p = tl.exp(x - higher)
        total = total * keep + tl.sum(p, 0)
        weighted = weighted * keep + tl.sum(tl.where(inside, p * x, 0.0), 0)
        top = higher
    rest = tl.log(total)
    chosen = tl.load(row + tl.load(TARGETS + n)).to(tl.float32) * scale
    tl.store(OUT + n, (chosen - top) - rest)
    tl.store(OUT + rows + n, rest - (weighted / total - top))
    tl.store(OUT + 2 * rows + n, top + rest)


def score(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    rows, width = logits.shape
    out = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    block = min(4096, triton.next_power_of_2(width))
    _score[(rows,)](logits, targets, out, 1.0 / temperature, rows, width, BLOCK=block, num_warps=8)
    return out


@triton.jit
def _score_back(LOGITS, TARGETS, SUMS, WEIGHTS, scale, width, BLOCK: tl.constexpr):
    n, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = LOGITS + n.to(tl.int64) * width + at
    x = tl.load(row, mask=at < width, other=0.0)
    p = tl.exp(x.to(tl.float32) * scale - tl.load(SUMS + n))
    p = tl.where(at == tl.load(TARGETS + n), p - 1.0, p)
    tl.store(row, (p * (tl.load(WEIGHTS + n) * scale)).to(x.dtype), mask=at < width)


def score_back(logits: Tensor, targets: Tensor, sums: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """In place: `logits` become their gradient."""
    rows, width = logits.shape
    block = min(4096, triton.next_power_of_2(width))
    grid = (rows, triton.cdiv(width, block))
    _score_back[grid](logits, targets, sums, weights, 1.0 / temperature, width, BLOCK=block, num_warps=8)
    return logits
