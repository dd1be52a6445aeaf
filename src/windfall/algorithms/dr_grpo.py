"""Dr. GRPO. "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783.

    A_i   = R_i - mean(R)                                     over the G responses of a group
    loss  = - 1/G sum_i 1/limit sum_t min(r_t A_i, clip(r_t, 1 - clip, 1 + clip) A_i),   r_t = pi(y_t) / pi_prox(y_t)
    w_t   = A_i r_t, or 0 where clipped

GRPO without its two biases: division by std(R) favors tasks that are nearly always or nearly never solved, and division
by |y_i| makes a token of a long wrong response cost less than one of a short wrong response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from windfall.algorithms.base import Algorithm, Floats, Outcome, SampledTokens, centered, clipped, rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class DrGRPO(Algorithm):
    mean_over: ClassVar = "limits"
    clip: float = 0.2

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        return [centered(rewards(group)).tolist() for group in groups]

    def weights(self, tokens: SampledTokens) -> Floats:
        return clipped(tokens.ratio, tokens.advantage, low=self.clip, high=self.clip)
