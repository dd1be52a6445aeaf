"""Log-probs from logits and their gradient, in plain torch on any device. trainer/kernels.py has the same functions in
Triton, and those that a decoder layer needs between its matrix products: tests/support/engines/plain_layers.py defines
them."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Log-softmax and gather, as (3, n) float32: log-probs of the targets, entropies, and log-sum-exps."""
    x = logits.float() / temperature
    top = x.max(-1).values
    x = x - top[:, None]  # so that the log-prob of a likely token is a small difference of small numbers
    total = torch.logsumexp(x, -1)
    entropy = total - ((x - total[:, None]).exp() * x).sum(-1)
    return torch.stack((x.gather(-1, targets[:, None])[:, 0] - total, entropy, top + total))


def token_logprobs_backward(
    logits: Tensor, targets: Tensor, sums: Tensor, weights: Tensor, temperature: float
) -> Tensor:
    """The gradient of the negative sum of weights * log-probs with respect to the logits."""
    p = (logits.float() / temperature - sums[:, None]).exp()
    p[torch.arange(len(targets), device=p.device), targets] -= 1.0
    return (p * (weights / temperature)[:, None]).to(logits.dtype)


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def for_device(device: torch.device) -> Any:
    """This module, or trainer/kernels.py on a GPU with Triton."""
    if not has_kernels(device):
        return sys.modules[__name__]
    from windfall.trainer import kernels

    return kernels
