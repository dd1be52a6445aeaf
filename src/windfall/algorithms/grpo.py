"""GRPO. "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300.

    A_i   = (R_i - mean(R)) / std(R)                          over the G responses of a group
    loss  = - 1/G sum_i 1/|y_i| sum_t min(r_t A_i, clip(r_t, 1 - clip, 1 + clip) A_i),   r_t = pi(y_t) / pi_prox(y_t)
    w_t   = A_i r_t / |y_i|, or 0 where clipped

The paper's KL term (beta = 0.04) is kl.py. Responses without a reward are left out of every mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from windfall.algorithms.base import Algorithm, Floats, SampledTokens, clipped


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO(Algorithm):
    clip: float = 0.2

    def weights(self, tokens: SampledTokens) -> Floats:
        return clipped(tokens.ratio, tokens.advantage, low=self.clip, high=self.clip) / tokens.length
