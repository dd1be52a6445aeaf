"""The GPU engine's sampling for the rows of another engine's batch.

That engine has the logits; it says which response each row belongs to when its batch changes, and at which position
each row is in every step. Tokens and log-probs stay on the device, and the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from windfall.engine.cuda import reference
from windfall.engine.cuda.state import DeviceState
from windfall.types import Sampling

_ALWAYS = 1 << 30
"""Tokens left in every row: the other engine decides when a response ends."""


class RowSampler:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._state = DeviceState.new(0, 1, str(device))
        self._rows = torch.zeros(0, dtype=torch.int32, device=device)
        self._truncate = False
        if self._on_gpu:
            from windfall.engine.cuda.kernels import sampling

            self._sample = sampling.sample
        else:
            self._sample = reference.sample

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
