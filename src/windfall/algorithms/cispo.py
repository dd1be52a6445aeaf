"""CISPO. "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention", arXiv 2506.13585.

    A_i   = (R_i - mean(R)) / std(R)                          over the G responses of a group
    loss  = - 1/sum_i |y_i| sum_i sum_t c_t A_i log pi(y_t),  c_t = clip(r_t, 1 - clip_low, 1 + clip_high) as a constant
    w_t   = c_t A_i,   r_t = pi(y_t) / pi_prox(y_t)

The clip bounds the weight of a token instead of removing the token: the rare words at which the reasoning changes
direction have large ratios, and PPO's clip drops exactly these. The paper sets no lower bound (clip_low = 1 means none)
and gives no number for the upper one; c_t <= 5 is from arXiv 2510.13786, which found 4, 5 and 8 equally good.

c_t and the factor of off-policy tokens (importance.py) are both importance weights, so their product is right as it
stands, and each has its own bound. `importance = "mask"` drops tokens, which CISPO is meant to avoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, SampledTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class CISPO(Algorithm):
    mean_over: ClassVar = "tokens"
    clip_low: float = 1.0
    clip_high: float = 4.0

    def weights(self, tokens: SampledTokens) -> Floats:
        return np.clip(tokens.ratio, 1 - self.clip_low, 1 + self.clip_high) * tokens.advantage
