"""Credit: what every sampled token is worth. Plain numbers in and out, no torch.

Every algorithm here is a policy gradient, so its whole loss is known by one number per token:

    gradient of the loss  =  - sum over tokens  weight_t * gradient of log pi(token_t)

`weights` returns those numbers; the trainer multiplies them with the log-probs it computed (as constants) and
differentiates. Clipping is a weight of zero, an importance ratio a factor. The trainer adds `normaliser` over all
responses of the mini-batch and divides the accumulated gradient by it once, at the end, so that groups may be
trained on in any order, as they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np

Floats = np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledTokens:
    """The sampled tokens of one response, as three arrays of equal length and the response's advantage."""

    logp: Floats
    """Under the weights being trained, now."""
    old: Floats
    """Under the policy that the step started from."""
    advantage: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What credit may look at: the reward of a response and its length."""

    reward: float
    length: int
    """Tokens that the policy sampled."""
    limit: int
    """The most tokens that a response may have (rollout.max_tokens), the environment's among them."""
    observed: int = 0
    """Tokens of the environment within the response. Not trained on, but they count towards the limit."""


class Algorithm(Protocol):
    scope: ClassVar[Literal["group", "batch"]]
    """Which outcomes `advantages` needs at once: those of one group, or those of all groups of the batch."""

    def advantages(self, groups: Sequence[Sequence[Outcome]]) -> list[list[float]]:
        """One number per response, in the same nesting."""
        ...

    def informative(self, group: Sequence[Outcome]) -> bool:
        """False: the group teaches nothing, and another task is drawn in its place (dynamic sampling)."""
        ...

    def weights(self, tokens: SampledTokens) -> Floats:
        """The factor on the gradient of each token's log-prob."""
        ...

    def normaliser(self, length: int, limit: int) -> float:
        """What one response of `length` sampled tokens adds to the divisor of the mini-batch's gradient."""
        ...
