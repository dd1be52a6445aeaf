"""Losses that a loop gives with its samples, instead of the algorithm of the recipe. They are those of the Tinker API.

    cross_entropy          - sum_t  a_t log pi_t
    importance_sampling    - sum_t  r_t a_t
    ppo                    - sum_t  min(r_t a_t, clip(r_t, low, high) a_t)
    cispo                  - sum_t  c_t a_t log pi_t,    c_t = clip(r_t, low, high) as a constant
    dro                    - sum_t  (a_t log pi_t - beta/2 (log pi_t - log q_t)^2)

pi is the policy at a temperature of 1, q the policy that sampled the tokens, r_t = pi_t / q_t, and a_t the weight (for
cross entropy) or the advantage of a token: each token has its own.

A loss is a sum over tokens, and so is its gradient over calls. Nothing divides it: who wants a mean divides the weights
or advantages. Its gradient is one weight per token, like that of every algorithm (base.py):

    cross_entropy: a_t    importance_sampling: r_t a_t    ppo: r_t a_t, or 0 where the clip is active
    cispo: c_t a_t        dro: a_t - beta (log pi_t - log q_t)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from windfall.algorithms.base import Floats, SampledTokens, clipped

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    name: LossName
    clip_low: float = 0.8
    """Lower bound of the ratio, for ppo and cispo."""
    clip_high: float = 1.2
    """Upper bound of the ratio, for ppo and cispo."""
    beta: float = 0.05
    """Weight of dro's quadratic penalty."""

    @property
    def needs_behavior(self) -> bool:
        """Whether the loss depends on the log-probs of the policy that sampled the tokens."""
        return self.name != "cross_entropy"

    def weights(self, tokens: SampledTokens) -> Floats:
        """The weight of each token. `tokens.proximal`: log-probs of the policy that sampled them."""
        a = np.asarray(tokens.advantage)
        match self.name:
            case "cross_entropy":
                return a * np.ones_like(tokens.logp)
            case "importance_sampling":
                return tokens.ratio * a
            case "ppo":
                return clipped(tokens.ratio, a, low=1 - self.clip_low, high=self.clip_high - 1)
            case "cispo":
                return np.clip(tokens.ratio, self.clip_low, self.clip_high) * a
            case "dro":
                return a - self.beta * (tokens.logp - tokens.proximal)

    def value(self, tokens: SampledTokens) -> float:
        """The loss of these tokens."""
        a = np.asarray(tokens.advantage)
        match self.name:
            case "cross_entropy":
                terms = a * tokens.logp
            case "importance_sampling":
                terms = tokens.ratio * a
            case "ppo":
                terms = np.minimum(tokens.ratio * a, np.clip(tokens.ratio, self.clip_low, self.clip_high) * a)
            case "cispo":
                terms = np.clip(tokens.ratio, self.clip_low, self.clip_high) * a * tokens.logp
            case "dro":
                terms = a * tokens.logp - self.beta / 2 * (tokens.logp - tokens.proximal) ** 2
        return -float(terms.sum())
