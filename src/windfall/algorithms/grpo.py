"""GRPO. "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300.

    A_i   = (R_i - mean(R)) / std(R)                          over the G responses of a group
    loss  = - 1/G sum_i 1/|y_i| sum_t min(r_t A_i, clip(r_t, 1 - clip, 1 + clip) A_i),   r_t = pi(y_t) / pi_prox(y_t)
    w_t   = A_i r_t / |y_i|, or 0 where clipped

The mean over a group becomes the mean over all responses of the mini-batch, which is the same if all groups have the
same size. The paper's KL term is `kl.kl_weights`, with beta / |y_i| for its beta of 0.04, because the term is inside
the mean. Missing rewards are not part of any mean: a group may have fewer than G responses.

Off-policy tokens: decoupled PPO, token by token. The clip acts on r_t alone, whose denominator is the policy at the
start of the step; a token of an older version gets the factor pi_prox / pi_behavior on top (importance.py).
The mean still divides by |y_i|, however many tokens are masked: a response does not gain weight by losing tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from windfall.algorithms.base import Floats, Outcome, SampledTokens
from windfall.algorithms.credit import clipped, normalized, ratio, rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPO:
    scope: ClassVar[Literal["group", "batch"]] = "group"
    importance_level: ClassVar[Literal["token", "sequence"]] = "token"
    clip: float = 0.2
    """The usual value in PPO."""

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        """All zero in a group with equal rewards, or with one response."""
        return [normalized(rewards(group)).tolist() for group in groups]

    def informative(self, group: Sequence[Outcome]) -> bool:
        return True

    def weights(self, tokens: SampledTokens) -> Floats:
        return clipped(ratio(tokens), tokens.advantage, low=self.clip, high=self.clip) / len(tokens.logp)

    def normalizer(self, length: int, limit: int) -> float:
        return 1.0
