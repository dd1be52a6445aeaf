"""The arithmetic that several algorithms share: baselines over a set of rewards, and the clip of PPO as a weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from windfall.algorithms.base import Floats, Outcome, SampledTokens

EPS = 1e-6
"""Added to a standard deviation: rewards that differ by rounding alone must not be blown up to +-1."""


def rewards(group: Sequence[Outcome]) -> Floats:
    return np.array([outcome.reward for outcome in group], dtype=np.float64)


def centred(values: Floats, counts: Floats | None = None) -> Floats:
    """Each value less their mean, in which a value counts `counts` times. Equal values, or a single one, give exact
    zeros: the rounding of the mean would leave a trace that a division by the deviation makes large.

    >>> centred(np.array([1.0, 0.0])).tolist()
    [0.5, -0.5]
    """
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    return values - np.average(values, weights=counts)


def normalised(values: Floats, counts: Floats | None = None) -> Floats:
    """Each value less the mean, in units of the population standard deviation (divided by n, not n - 1, so that a
    group of any size has one)."""
    apart = centred(values, counts)
    return apart / (np.sqrt(np.average(apart**2, weights=counts)) + EPS) if apart.any() else apart


def ratio(tokens: SampledTokens) -> Floats:
    """How much likelier each token has become since the step began."""
    return np.exp(tokens.logp - tokens.old)


def clipped(ratio: Floats, advantage: float, *, low: float, high: float) -> Floats:
    """The weight of PPO's min(r A, clip(r, 1 - low, 1 + high) A).

    Where the minimum is r A its gradient is A r grad log pi; where it is the clipped constant there is none. The
    constant is the smaller one only where the ratio has gone too far in the direction that the advantage asks for: up
    for a good response, down for a bad one.

    >>> clipped(np.array([0.5, 1.0, 1.5]), 2.0, low=0.2, high=0.2).tolist()
    [1.0, 2.0, 0.0]
    """
    active = ratio <= 1 + high if advantage > 0 else ratio >= 1 - low
    return np.where(active, advantage * ratio, 0.0)
