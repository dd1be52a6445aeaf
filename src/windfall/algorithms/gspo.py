"""GSPO. "Group Sequence Policy Optimization", arXiv 2507.18071.

    A_i   = (R_i - mean(R)) / std(R)                          over the G responses of a group
    s_i   = (pi(y_i) / pi_old(y_i)) ^ (1/|y_i|)  =  exp(mean_t log r_t)
    loss  = - 1/G sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    w_t   = A_i s_i / |y_i|, or 0 for the whole response if clipped

The reward belongs to a whole response, and so do the ratio and its clip. A geometric mean of many ratios is much closer
to 1 than a single ratio, hence the narrow range. The mean over a group becomes the mean over all responses of the
mini-batch, which is the same if all groups have the same size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from windfall.algorithms.base import Floats, Outcome, SampledTokens
from windfall.algorithms.credit import clipped, normalized, rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPO:
    scope: ClassVar[Literal["group", "batch"]] = "group"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        """All zero in a group with equal rewards, or with one response."""
        return [normalized(rewards(group)).tolist() for group in groups]

    def informative(self, group: Sequence[Outcome]) -> bool:
        return True

    def weights(self, tokens: SampledTokens) -> Floats:
        s = np.exp(np.mean(tokens.logp - tokens.old))
        weight = clipped(s, tokens.advantage, low=self.clip_low, high=self.clip_high)
        return np.full_like(tokens.logp, weight / len(tokens.logp))

    def normalizer(self, length: int, limit: int) -> float:
        return 1.0
