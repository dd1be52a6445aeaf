"""Sampling: from logits to a token, as a function of (seed, position, logits) and nothing else.

A counter-based hash gives one uniform random number per (seed, position). The token is the first one whose cumulative
probability, in vocabulary order, exceeds that number. There is no generator state, so a response that moves,
restarts or shares a step with others samples the same tokens. Whatever the logits are, the token is in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from windfall.types import Sampling

CHUNK = 1 << 18
"""Logits that are sampled from at once on a CPU. For all of a large batch, memory that is computed from them would be
given back to the system and taken from it again in every step."""
SPAN = 256
"""Entries of the vocabulary that are added up at once on a CPU, where a sum is eight times as fast as a cumulative sum:
the latter is computed over all spans, and over the entries of one."""
_GOLDEN, _MIX1, _MIX2 = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of 64 bits in which every input bit affects every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (seed, position).

    >>> float(uniform([7], [0])[0]) == float(uniform([1, 7], [3, 0])[1])
    True
    """
    s = np.array([x & 0xFFFFFFFFFFFFFFFF for x in seeds], dtype=np.uint64)
    p = np.array(positions, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(s + _GOLDEN) + (p + np.uint64(1)) * _GOLDEN)
    # 52 bits, not 53: then u * total is below total even after rounding, so a token is always found.
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(
    logits: Tensor, seeds: Sequence[int], positions: Sequence[int], sampling: Sequence[Sampling]
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, one per row of `logits` (rows, vocabulary)."""
    device = logits.device
    temperature, cut = None, None
    if any(s.temperature != 1.0 for s in sampling):
        temperature = torch.tensor([s.temperature for s in sampling], device=device)
    if any(s.top_k > 0 or s.top_p < 1.0 for s in sampling):
        top_p = torch.tensor([s.top_p for s in sampling], device=device, dtype=torch.float64)
        cut = torch.tensor([s.top_k for s in sampling], device=device), top_p
    u = torch.from_numpy(uniform(seeds, positions)).to(device)
    rows = max(1, CHUNK // logits.shape[-1]) if device.type == "cpu" else len(logits)
    parts = [slice(i, i + rows) for i in range(0, len(logits), rows)]
    drawn = [
        draw(
            logits[part],
            u[part],
            None if temperature is None else temperature[part],
            None if cut is None else (cut[0][part], cut[1][part]),
        )
        for part in parts
    ]
    return drawn[0] if len(drawn) == 1 else (torch.cat([t for t, _ in drawn]), torch.cat([p for _, p in drawn]))


def draw(
    logits: Tensor, u: Tensor, temperature: Tensor | None = None, cut: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs, given uniform random numbers. `temperature`: of every row, 0 for greedy; None: 1.
    `cut`: top-k (0: no limit) and top-p (1: no limit) of every row. The host never waits for the device."""
    logits = logits.float()
    if temperature is not None:
        logits = logits / torch.where(temperature == 0.0, 1.0, temperature)[:, None]
    logp = torch.log_softmax(logits, -1)
    tokens = first_above(logp.exp() if cut is None else truncated_probs(logp, *cut), u)
    if temperature is not None:
        tokens = torch.where(temperature == 0.0, logp.argmax(-1), tokens)
    tokens = tokens.clamp_max(logits.shape[-1] - 1)  # NaN logits: one bad row must not end the whole step
    return tokens, logp.gather(-1, tokens[:, None])[:, 0]


def first_above(p: Tensor, u: Tensor) -> Tensor:
    """For every row of `p`, the first index at which its cumulative sum exceeds `u` times its total."""
    if p.device.type != "cpu" or p.shape[-1] <= SPAN:
        cumulative = p.cumsum(-1, dtype=torch.float64)
        return torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]
    if p.shape[-1] % SPAN:
        p = pad(p, (0, -p.shape[-1] % SPAN))
    spans = p.unflatten(-1, (-1, SPAN))
    ends = spans.sum(-1).cumsum(-1, dtype=torch.float64)
    target = (u * ends[:, -1])[:, None]
    span = torch.searchsorted(ends, target, right=True).clamp_max(ends.shape[-1] - 1)
    inside = spans.take_along_dim(span[..., None], 1)[:, 0].cumsum(-1, dtype=torch.float64)
    rest = target - pad(ends, (1, 0)).gather(-1, span)
    # A span's sum and the end of its cumulative sum may be rounded differently: stay below both.
    rest = rest.minimum(torch.nextafter(inside[:, -1:], torch.zeros_like(rest)))
    return (span * SPAN + torch.searchsorted(inside, rest, right=True))[:, 0]


def truncated_probs(logp: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities with everything outside top-k and top-p set to zero. Ties keep vocabulary order."""
    p = logp.exp()
    ordered, index = torch.sort(p, dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    ordered = torch.where(rank < torch.where(top_k > 0, top_k, p.shape[-1])[:, None], ordered, 0.0)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    total = ordered.sum(-1, keepdim=True, dtype=torch.float64)
    excluded = (before >= top_p.double()[:, None] * total) & (rank > 0) & (top_p < 1.0)[:, None]
    return torch.zeros_like(p).scatter_(-1, index, ordered.masked_fill(excluded, 0.0))
