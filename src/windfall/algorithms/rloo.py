"""RLOO. "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
arXiv 2402.14740.

    A_i   = R_i - mean of R_j over j != i  =  (R_i - mean(R)) G / (G - 1)
    loss  = - 1/G sum_i A_i log pi(y_i)                       log pi(y_i) = sum_t log pi(y_t)
    w_t   = A_i

The whole response is one action: no ratio, no clip, no division by length. It is meant for one update per batch. The
exact importance weight of an off-policy response is the product of the factors of all its tokens, whose variance grows
exponentially with the length, so each token gets only its own factor: a small bias, as in all token-level corrections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, Outcome, SampledTokens, centered, rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class RLOO(Algorithm):
    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        """A response without siblings (they may have failed) gets 0, because it has no baseline: its bare reward would
        be a weight on a different scale than those of all other responses."""
        return [(centered(rewards(group)) * len(group) / max(len(group) - 1, 1)).tolist() for group in groups]

    def weights(self, tokens: SampledTokens) -> Floats:
        return np.full_like(tokens.logp, tokens.advantage)
