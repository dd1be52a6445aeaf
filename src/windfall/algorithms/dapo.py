"""DAPO. "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv 2503.14476.

    R'_i  = R_i - overlong_penalty * min(1, max(0, (n_i - (limit - cache)) / cache))        cache = overlong_cache
    A_i   = (R'_i - mean(R')) / std(R')                       over the G responses of a group
    loss  = - 1/sum_i |y_i| sum_i sum_t min(r_t A_i, clip(r_t, 1 - clip_low, 1 + clip_high) A_i)
    w_t   = A_i r_t, or 0 where clipped,   r_t = pi(y_t) / pi_prox(y_t)

n_i counts all tokens of the response, including those of the environment, as the limit does: a truncated response
has n_i = limit and the full penalty. A group with equal rewards is replaced by another (dynamic sampling). The paper's
overlong_cache is 4096 with a limit of 20480.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from windfall.algorithms.base import Algorithm, Floats, Outcome, SampledTokens, clipped, normalized
from windfall.errors import WindfallError


@dataclass(frozen=True, kw_only=True, slots=True)
class DAPO(Algorithm):
    mean_over: ClassVar = "tokens"
    clip_low: float = 0.2
    clip_high: float = 0.28
    overlong_cache: int = 0
    """Number of tokens before the limit over which the penalty grows from 0 to `overlong_penalty`. 0: no penalty."""
    overlong_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.overlong_penalty != 1.0 and not self.overlong_cache:
            fix = "Set overlong_cache, too: the number of tokens before the limit over which it grows."
            raise WindfallError("overlong_penalty has no effect without overlong_cache", where="dapo", fix=fix)

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        return [normalized(np.array([self.shaped(o) for o in group])).tolist() for group in groups]

    def shaped(self, outcome: Outcome) -> float:
        if self.overlong_cache == 0:
            return outcome.reward
        taken = outcome.length + outcome.observed
        over = (taken - (outcome.limit - self.overlong_cache)) / self.overlong_cache
        return outcome.reward - self.overlong_penalty * min(1.0, max(0.0, over))

    def informative(self, group: Sequence[Outcome]) -> bool:
        """Judges by rewards alone: a task that is always solved is uninformative, however long its responses are."""
        return len({outcome.reward for outcome in group}) > 1

    def weights(self, tokens: SampledTokens) -> Floats:
        return clipped(tokens.ratio, tokens.advantage, low=self.clip_low, high=self.clip_high)
