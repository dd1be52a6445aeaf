"""Credit assignment: the weight of every sampled token. Plain numbers in and out, no torch.

Three policies give a sampled token a log-prob (decoupled PPO: arXiv 2110.00641, and AReaL, arXiv 2505.24298):

    behavior    the policy that sampled it, in the engine. Tokens of one response may come from several versions
    proximal    the policy at the start of the step: all updates of the step are measured, and clipped, against it.
                A clip around the behavior policy would drop tokens only because they are old
    current     the policy that is being updated. Only this one has a gradient

    loss_t  =  - v_t min(r_t A, clip(r_t) A)        r_t = current / proximal,   v_t = proximal / behavior

r_t belongs to the algorithm (`Algorithm.weights`). v_t is a constant, computed by importance.py for all algorithms.

Every algorithm here is a policy gradient, so one number per token determines its whole loss:

    gradient of the loss  =  - sum over tokens  weight_t * gradient of log pi(token_t)

The trainer multiplies the log-probs it computes by the weights, as constants, and differentiates. Clipping is a weight
of zero; an importance ratio is a factor. The trainer sums `normalizer` over all responses of the mini-batch and divides
the accumulated gradient by the sum once, at the end, so groups can be trained on in any order, as they arrive. So the
mean over a group of a paper is the mean over the mini-batch here: the same if all groups have the same size.

A response counts once, however many segments it has: |y_i| is the number of sampled tokens of all its segments, and a
segment with n of them adds n / |y_i| of the response's normalizer. Masked off-policy tokens count in |y_i|, too:
masking lowers the gradient and never raises the weight of other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

Floats = np.ndarray
EPS = 1e-6
"""Added to a standard deviation, so that rewards that differ only by rounding do not become +-1."""


def centered(values: Floats, counts: Floats | None = None) -> Floats:
    """Each value minus the mean, weighted by `counts` if given. Equal values, or a single value, give exactly 0;
    otherwise a division by the deviation would amplify the rounding error of the mean.

    >>> centered(np.array([1.0, 0.0])).tolist()
    [0.5, -0.5]
    """
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    return values - np.average(values, weights=counts)


def normalized(values: Floats, counts: Floats | None = None) -> Floats:
    """Each value minus the mean, divided by the population standard deviation, which exists for groups of any size."""
    differences = centered(values, counts)
    if not differences.any():
        return differences
    return differences / (np.sqrt(np.average(differences**2, weights=counts)) + EPS)


def clipped(ratio: Floats, advantage: float | Floats, *, low: float, high: float) -> Floats:
    """The weight of PPO's min(r A, clip(r, 1 - low, 1 + high) A).

    Where the minimum is r A, its gradient is A r grad log pi. Where it is the clipped constant, the gradient is 0: the
    ratio has moved too far in the direction of the advantage (up for a good response, down for a bad one).

    >>> clipped(np.array([0.5, 1.0, 1.5]), 2.0, low=0.2, high=0.2).tolist()
    [1.0, 2.0, 0.0]
    """
    active = np.where(np.asarray(advantage) > 0, ratio <= 1 + high, ratio >= 1 - low)
    return np.where(active, advantage * ratio, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """The sampled tokens of one sequence, as two arrays of equal length, and the advantage of its response, or of each
    token. A response with several segments is several sequences."""

    logp: Floats
    proximal: Floats
    """Log-probs under the policy from which the step started."""
    advantage: float | Floats
    whole: int = 0
    """Number of sampled tokens of the whole response. 0: this sequence is the whole response."""

    @property
    def length(self) -> int:
        return self.whole or len(self.logp)

    @property
    def ratio(self) -> Floats:
        """pi / pi_prox of each token: how much more likely it has become since the step began."""
        return np.exp(self.logp - self.proximal)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    reward: float
    length: int
    limit: int
    """Maximum number of tokens of a response (rollout.max_tokens), including those of the environment."""
    observed: int = 0
    """Tokens of the environment within the response. They are not trained on, but count toward the limit."""


def rewards(group: Sequence[Outcome]) -> Floats:
    return np.array([outcome.reward for outcome in group], dtype=np.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The base class. Its defaults are those of GRPO. The fields of a subclass are the options of the algorithm."""

    scope: ClassVar[Literal["group", "batch"]] = "group"
    """Which outcomes `advantages` needs together: those of one group, or those of all groups of the batch."""
    importance_level: ClassVar[Literal["token", "sequence"]] = "token"
    """Unit that gets an importance weight in a response with tokens of older versions (importance.py)."""

    mean_over: ClassVar[Literal["responses", "tokens", "limits"]] = "responses"
    """What the mini-batch's gradient is a mean over: its responses, their sampled tokens, or their maximum lengths."""

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        """One number per response, nested like `groups`. By default (R - mean(R)) / std(R) within the group, which is 0
        if its rewards are equal, or if it has only one response."""
        return [normalized(rewards(group)).tolist() for group in groups]

    def informative(self, group: Sequence[Outcome]) -> bool:
        """False: nothing can be learned from the group, and another task is drawn instead (dynamic sampling)."""
        return True

    def weights(self, tokens: SampledTokens) -> Floats:
        raise NotImplementedError

    def normalizer(self, length: int, limit: int) -> float:
        """What a response with `length` sampled tokens adds to the divisor of the mini-batch's gradient."""
        return {"responses": 1.0, "tokens": float(length), "limits": float(limit)}[self.mean_over]
