# pyright: reportMissingImports=false, reportIndexIssue=false, reportInvalidTypeForm=false
"""Log-softmax and gather: log-probs of given tokens from logits, and the gradient. The forward reads the logits once;
the backward overwrites them with its result."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
