"""Sampling on the device without kernels: in plain torch, from the state of the slots, as in engine/torch/sampler.py.

The GPU engine uses it where a response has top-k or top-p, which need a sort.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windfall.engine.cuda.state import DeviceState
from windfall.engine.torch import sampler

_GOLDEN, _MIX1, _MIX2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def sample(
    logits: Tensor,
    rows: Tensor,
    state: DeviceState,
    tokens_out: Tensor,
    logprobs_out: Tensor,
    truncate: bool,
    width: int = 1,
) -> None:
    """Sample `width` tokens for every row's slot, from as many rows of `logits`: the token at its position, and those
    at the positions after it. Write them and their log-probs; -1 and 0 where no token may be generated. `truncate`:
    apply top-k and top-p."""
    ahead = torch.arange(width, device=rows.device).repeat(len(rows))
    at = rows.long().repeat_interleave(width)
    active = state.left[at] > ahead
    cut = (state.top_k[at], state.top_p[at]) if truncate else None
    u = uniform(state.seed[at], state.position[at] + ahead)
    tokens, logprobs = sampler.draw(logits, u, state.temperature[at], cut)
    tokens_out.copy_(torch.where(active, tokens, -1))
    logprobs_out.copy_(torch.where(active, logprobs, 0.0))


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """`windfall.engine.torch.sampler.uniform` on tensors.

    >>> uniform(torch.tensor([7]), torch.tensor([0], dtype=torch.int32)).tolist()
    [0.7215081806049701]
    """
    bits = _mix(_mix(seed + _GOLDEN) + (position.long() + 1) * _GOLDEN)
    return _logical_shift(bits, 12).double() * 2.0**-52


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX1
    x = (x ^ _logical_shift(x, 27)) * _MIX2
    return x ^ _logical_shift(x, 31)


def _logical_shift(x: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros: torch has only signed integers."""
    return (x >> by) & (2 ** (64 - by) - 1)
