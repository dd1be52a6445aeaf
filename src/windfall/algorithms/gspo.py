"""GSPO. "Group Sequence Policy Optimization", arXiv 2507.18071.

    A_i   = (R_i - mean(R)) / std(R)                          over the G responses of a group
    s_i   = (pi(y_i) / pi_old(y_i)) ^ (1/|y_i|)  =  exp(mean_t log r_t)
    loss  = - 1/G sum_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    w_t   = A_i s_i / |y_i|, or 0 for the whole response where the clip holds

The reward is given to a response, so the ratio and its clip are a response's too. A geometric mean of many ratios lies
far closer to 1 than one of them, hence the narrow range. The mean over a group becomes the mean over all responses of
the mini-batch: the same when groups are equally large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from windfall.algorithms.base import Floats, Outcome, SampledTokens
from windfall.algorithms.credit import clipped, normalised, rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPO:
    scope: ClassVar[Literal["group", "batch"]] = "group"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        """All zero in a group of equal rewards, or of one response."""
        return [normalised(rewards(group)).tolist() for group in groups]

    def informative(self, group: Sequence[Outcome]) -> bool:
        return True

    def weights(self, tokens: SampledTokens) -> Floats:
        s = np.exp(np.mean(tokens.logp - tokens.old))
        weight = clipped(s, tokens.advantage, low=self.clip_low, high=self.clip_high)
        return np.full_like(tokens.logp, weight / len(tokens.logp))

    def normaliser(self, length: int, limit: int) -> float:
        return 1.0
