"""GSPO. "Group Sequence Policy Optimization", arXiv 2507.18071.

    A_i   = (R_i - mean(R)) / std(R)                          over the G responses of a group
    s_i   = (pi(y_i) / pi_prox(y_i)) ^ (1/|y_i|)  =  exp(mean_t log r_t)
    loss  = - 1/G sum_i v_i min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)
    v_i   = (pi_prox(y_i) / pi_behavior(y_i)) ^ (1/|y_i|),    truncated or masked as one number (importance.py)
    w_t   = A_i s_i / |y_i|, or 0 for the whole response if clipped

The reward belongs to a whole response, and so do the ratio, its clip and the importance weight: factors per token would
bring back the noise that the paper removes. A geometric mean of many ratios is much closer to 1 than a single ratio,
hence the narrow range; an `importance_cap` of 2 hardly ever takes effect, 1.05 does. If all tokens of a response are
fresh, each keeps its own factor, which corrects for the engine's rounding only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, SampledTokens, clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class GSPO(Algorithm):
    importance_level: ClassVar = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def weights(self, tokens: SampledTokens) -> Floats:
        s = np.exp(np.mean(tokens.logp - tokens.proximal))
        weight = clipped(s, tokens.advantage, low=self.clip_low, high=self.clip_high)
        return np.full_like(tokens.logp, weight / tokens.length)
