"""What a decoder layer does between its matrix products, forward and backward, in plain torch on any device.

kernels.py has the same functions for a GPU. They round where transformers' Llama and Qwen modules round, but for sums
that need not be rounded twice. `_back` functions return gradients, and with them what they had to compute again of the
forward pass and the caller needs. They may write into the tensors they are given.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor


def norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + add, and that sum. (T, H)."""
    x = x if add is None else x + add
    return weight * _unit(x, eps)[0].to(x.dtype), x


def norm_back(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carry: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x, `carry` added; the norm again; gradient of the weight, in float32."""
    unit, scale = _unit(x, eps)
    rounded, g = unit.to(x.dtype), grad.float()
    weighted = g * weight.float()
    back = scale * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    if carry is not None:
        back = back + carry.float()
    return back.to(x.dtype), weight * rounded, (g * rounded.float()).sum(tuple(range(x.dim() - 1)))


def turn(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int, q_norm: Tensor | None, k_norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Queries and keys out of the joint projection (T, (heads + 2 kv_heads) * head): their norms if they have any, and
    the rotary embedding. cos and sin are (T, head). Returns (T, heads, head) and (T, kv_heads, head)."""
    out = []
    for x, weight in zip(_heads(qkv, cos.shape[-1], heads, kv_heads), (q_norm, k_norm), strict=True):
        x = x if weight is None else norm(x, weight, eps)[0]
        a, b = x.float().chunk(2, -1)
        out.append((x.float() * cos[:, None].float() + torch.cat((-b, a), -1) * sin[:, None].float()).to(x.dtype))
    return out[0], out[1]


def turn_back(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the joint projection, and of the norms' weights."""
    parts, weights = [], []
    both = zip((dq, dk), _heads(qkv, cos.shape[-1], heads, kv_heads), (q_norm, k_norm), strict=True)
    for grad, x, weight in both:
        turned = grad.float() * sin[:, None].float()
        a, b = turned.chunk(2, -1)
        back = grad.float() * cos[:, None].float() + torch.cat((b, -a), -1)
        of_weight = None
        if weight is not None:
            back, _, of_weight = norm_back(back, x, weight, eps, None)
        parts.append(back.to(x.dtype).flatten(1))
        weights.append(of_weight)
    return torch.cat((*parts, dv.flatten(1)), 1), weights[0], weights[1]


def gate(both: Tensor) -> Tensor:
    """silu(first half) * second half. (T, 2 I) to (T, I)."""
    g, u = both.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def gate_back(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of both halves (T, 2 I), and the gated product again (T, I)."""
    g, u = (x.float() for x in both.chunk(2, -1))
    open_ = torch.sigmoid(g)
    du, dg = grad.float() * g * open_, grad.float() * u * open_ * (1 + g * (1 - open_))
    return torch.cat((dg, du), -1).to(both.dtype), gate(both)


def score(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """(3, n) float32: log-probs of the targets, entropies, and log-sum-exps for `score_back`."""
    x = logits.float() / temperature
    top = x.max(-1).values
    x = x - top[:, None]  # so that a likely token's log-prob is a small difference of small numbers
    total = torch.logsumexp(x, -1)
    entropy = total - ((x - total[:, None]).exp() * x).sum(-1)
    return torch.stack((x.gather(-1, targets[:, None])[:, 0] - total, entropy, top + total))


def score_back(logits: Tensor, targets: Tensor, sums: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """The gradient of minus the sum of weights * log-probs, by the logits."""
    p = (logits.float() / temperature - sums[:, None]).exp()
    p[torch.arange(len(targets), device=p.device), targets] -= 1.0
    return (p * (weights / temperature)[:, None]).to(logits.dtype)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    f = x.float()
    scale = torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return f * scale, scale


def _heads(qkv: Tensor, head: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    rows = qkv.unflatten(1, (-1, head))
    return rows[:, :heads], rows[:, heads : heads + kv_heads]


def for_device(device: torch.device) -> Any:
    """This module, or its twin in Triton."""
    if device.type == "cuda" and importlib.util.find_spec("triton"):
        from windfall.train import kernels

        return kernels
    return sys.modules[__name__]
