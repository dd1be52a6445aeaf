"""REINFORCE++. "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization",
arXiv 2501.03262.

    B_i   = R_i, or R_i - mean(R of its group) with baseline = "group"
    A_i   = (B_i - mean(B)) / std(B)                          over all tokens of the batch, whatever their version
    loss  = - 1/sum_i |y_i| sum_i sum_t min(r_t A_i, clip(r_t, 1 - clip, 1 + clip) A_i),   r_t = pi(y_t) / pi_prox(y_t)
    w_t   = A_i r_t, or 0 where clipped

Every response counts once per token in the mean and deviation. The paper's KL penalty inside the reward is left out: a
KL term is added to the loss instead (kl.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, Outcome, SampledTokens, centered, clipped, normalized, rewards
from windfall.errors import WindfallError


@dataclass(frozen=True, kw_only=True, slots=True)
class ReinforcePP(Algorithm):
    mean_over: ClassVar = "tokens"
    scope: ClassVar = "batch"
    clip: float = 0.2
    baseline: Literal["none", "group"] = "none"

    def __post_init__(self) -> None:
        if self.baseline not in ("none", "group"):
            fix = "Use one of: group, none."
            raise WindfallError(f"unknown baseline '{self.baseline}'", where="reinforce_pp", fix=fix)

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        scores = [centered(rewards(g)) if self.baseline == "group" else rewards(g) for g in groups]
        lengths = np.array([outcome.length for group in groups for outcome in group])
        flat = iter(normalized(np.concatenate([*scores, []]), lengths).tolist())
        return [[next(flat) for _ in group] for group in groups]

    def weights(self, tokens: SampledTokens) -> Floats:
        return clipped(tokens.ratio, tokens.advantage, low=self.clip, high=self.clip)
