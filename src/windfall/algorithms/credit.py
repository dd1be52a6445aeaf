"""Shared arithmetic: baselines over a set of rewards, and the clip of PPO as a weight."""

from __future__ import annotations

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


def clipped(ratio: Floats, advantage: float, *, low: float, high: float) -> Floats:
    """The weight of PPO's min(r A, clip(r, 1 - low, 1 + high) A).

    Where the minimum is r A, its gradient is A r grad log pi. Where it is the clipped constant, the gradient is 0: the
    ratio has moved too far in the direction of the advantage (up for a good response, down for a bad one).

    >>> clipped(np.array([0.5, 1.0, 1.5]), 2.0, low=0.2, high=0.2).tolist()
    [1.0, 2.0, 0.0]
    """
    active = ratio <= 1 + high if advantage > 0 else ratio >= 1 - low
    return np.where(active, advantage * ratio, 0.0)
