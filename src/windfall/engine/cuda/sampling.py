"""Sampling on the device without kernels: in plain torch, from the state of the slots, as in engine/torch/sampler.py.

The GPU engine uses it where a response has top-k or top-p, which need a sort. `RowSampler` samples for another engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windfall.engine.cuda.state import DeviceState
from windfall.engine.torch import sampler
from windfall.types import Sampling

_GOLDEN, _MIX1, _MIX2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_ALWAYS = 1 << 30
"""Tokens left in every row of another engine, which decides when a response ends."""


def sample(
    logits: Tensor, rows: Tensor, state: DeviceState, tokens_out: Tensor, logprobs_out: Tensor, truncate: bool
) -> None:
    """Sample the next token of every active row, write it and its log-prob (inactive rows: -1 and 0), and update the
    state. `truncate`: apply top-k and top-p. An inactive slot never changes, whatever rows refer to it."""
    at = rows.long()
    active = state.left[at] > 0
    cut = (state.top_k[at], state.top_p[at]) if truncate else None
    tokens, logprobs = sampler.draw(logits, uniform(state.seed[at], state.position[at]), state.temperature[at], cut)
    tokens_out.copy_(torch.where(active, tokens, -1))
    logprobs_out.copy_(torch.where(active, logprobs, 0.0))
    step = active.int()
    stopped = (tokens[:, None] == state.stop[at]).any(-1)
    # Rows of an inactive slot write back the values that are there already, so several may refer to the same slot.
    state.last[at] = torch.where(active, tokens.int(), state.last[at])
    state.length[at] = state.length[at] + step
    state.position[at] = state.position[at] + step
    state.left[at] = torch.where(active & ~stopped, state.left[at] - step, 0)


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


class RowSampler:
    """The GPU engine's sampling for the rows of another engine's batch. That engine has the logits; it says which
    response each row belongs to when its batch changes, and at which position each row is in every step. Tokens and
    log-probs stay on the device, and the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._state = DeviceState.new(0, 1, str(device))
        self._rows = torch.zeros(0, dtype=torch.int32, device=device)
        self._truncate = False
        self._sample = sample
        if self._on_gpu:
            from windfall.engine.cuda.kernels import sampling

            self._sample = sampling.sample

    def set_rows(self, seeds: Sequence[int], samplings: Sequence[Sampling]) -> None:
        """Row n of the next batches has seed n and sampling n."""
        count = len(seeds)
        if count > len(self._rows):
            self._state = DeviceState.new(2 * count, 1, str(self._device))
            self._rows = torch.arange(2 * count, dtype=torch.int32, device=self._device)
        s = self._state
        bits = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64).view(np.int64)
        self._copy(s.seed, bits)
        self._copy(s.temperature, np.array([x.temperature for x in samplings], np.float32))
        self._copy(s.top_k, np.array([x.top_k for x in samplings], np.int32))
        self._copy(s.top_p, np.array([x.top_p for x in samplings], np.float32))
        s.left[:count] = _ALWAYS
        self._truncate = any(x.top_k > 0 or x.top_p < 1.0 for x in samplings)

    def sample(self, logits: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Tokens (int32) and their log-probs, one per row. `positions`: of each row's next token in its response."""
        count = len(positions)
        self._copy(self._state.position, positions.astype(np.int32))
        tokens = torch.empty(count, dtype=torch.int32, device=self._device)
        logprobs = torch.empty(count, dtype=torch.float32, device=self._device)
        self._sample(logits, self._rows[:count], self._state, tokens, logprobs, self._truncate)
        return tokens, logprobs

    def _copy(self, to: Tensor, values: np.ndarray) -> None:
        host = torch.from_numpy(values)
        to[: len(values)].copy_(host.pin_memory() if self._on_gpu else host, non_blocking=True)
