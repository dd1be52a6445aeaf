"""The operations of a decoder layer between its matrix products, forward and backward, in plain torch on any device.

They define what trainer/kernels.py computes in Triton, and let windfall's own layers run in tests without a GPU.

They round where the Llama and Qwen modules of transformers round, except for sums that need not be rounded twice.
`_backward` functions return gradients, and values of the forward pass that they had to recompute and that the caller
needs. They may overwrite their arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.trainer.model import layers


def rms_norm(x: Tensor, weight: Tensor, eps: float, add: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + add, and the sum x + add. Shapes are (T, H)."""
    x = x if add is None else x + add
    return weight * _unit(x, eps)[0].to(x.dtype), x


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, carry: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x plus `carry`; the recomputed output of the norm; gradient of the weight, in float32."""
    unit, scale = _unit(x, eps)
    rounded, g = unit.to(x.dtype), grad.float()
    weighted = g * weight.float()
    back = scale * (weighted - unit * (weighted * unit).mean(-1, keepdim=True))
    if carry is not None:
        back = back + carry.float()
    return back.to(x.dtype), weight * rounded, (g * rounded.float()).sum(tuple(range(x.dim() - 1)))


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
    """Queries and keys from the joint projection (T, (heads + 2 kv_heads) * head), with their norms, if any, and the
    rotary embedding applied. cos and sin are (T, head). Returns (T, heads, head) and (T, kv_heads, head)."""
    out = []
    for x, weight in zip(_heads(qkv, cos.shape[-1], heads, kv_heads), (q_norm, k_norm), strict=True):
        x = x if weight is None else rms_norm(x, weight, eps)[0]
        a, b = x.float().chunk(2, -1)
        out.append((x.float() * cos[:, None].float() + torch.cat((-b, a), -1) * sin[:, None].float()).to(x.dtype))
    return out[0], out[1]


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
    """Gradients of the joint projection and of the weights of the two norms."""
    parts, weights = [], []
    inputs = zip((dq, dk), _heads(qkv, cos.shape[-1], heads, kv_heads), (q_norm, k_norm), strict=True)
    for grad, x, weight in inputs:
        rotated = grad.float() * sin[:, None].float()
        a, b = rotated.chunk(2, -1)
        back = grad.float() * cos[:, None].float() + torch.cat((b, -a), -1)
        weight_grad = None
        if weight is not None:
            back, _, weight_grad = rms_norm_backward(back, x, weight, eps, None)
        parts.append(back.to(x.dtype).flatten(1))
        weights.append(weight_grad)
    return torch.cat((*parts, dv.flatten(1)), 1), weights[0], weights[1]


def apply_swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU: silu(first half) * second half. (T, 2 I) to (T, I)."""
    g, u = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def apply_swiglu_backward(grad: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of both halves (T, 2 I), and the recomputed output (T, I)."""
    g, u = (x.float() for x in gate_up.chunk(2, -1))
    sigmoid = torch.sigmoid(g)
    du, dg = grad.float() * g * sigmoid, grad.float() * u * sigmoid * (1 + g * (1 - sigmoid))
    return torch.cat((dg, du), -1).to(gate_up.dtype), apply_swiglu(gate_up)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    f = x.float()
    scale = torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps)
    return f * scale, scale


def _heads(qkv: Tensor, head: int, heads: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    rows = qkv.unflatten(1, (-1, head))
    return rows[:, :heads], rows[:, heads : heads + kv_heads]


def install() -> None:
    """Make them the operations of every device without kernels."""
    for function in (
        rms_norm, rms_norm_backward, apply_rotary, apply_rotary_backward, apply_swiglu, apply_swiglu_backward,
    ):  # fmt: skip
        setattr(layers, function.__name__, function)
