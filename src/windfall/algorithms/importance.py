"""Importance weights: constant factors for tokens that were sampled by a policy other than the proximal one (base.py).

The two log-probs of a token differ because it may be several versions old ([rollout] staleness above 0), or because
rollout and training compute the same weights with different kernels or precision.

    ratio_t   = exp(proximal_t - behavior_t)

    truncate    w_t *= min(ratio_t, cap)                                the default
    mask        w_t *= ratio_t, or 0 if ratio_t > cap or ratio_t < 1/cap
    off         w_t *= 1                                                no correction, for comparison

The cap bounds the variance at the price of a small bias. With `importance_level = "sequence"`, a response with tokens
of older versions is weighted as a whole: ratio_t becomes the geometric mean over the response (see gspo.py).

Source of truncation: F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025
(fengyao.notion.site/off-policy-rl).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from windfall.algorithms.base import Floats

ImportanceMode = Literal["truncate", "mask", "off"]


def importance_weights(
    proximal: Floats,
    behavior: Floats,
    *,
    mode: ImportanceMode,
    cap: float,
    level: Literal["token", "sequence"] = "token",
) -> tuple[Floats, np.ndarray]:
    """Factors for `Algorithm.weights`, one per token, and which of them were truncated or masked.

    >>> proximal, behavior = np.log([0.5, 0.2]), np.log([0.1, 0.4])
    >>> weights, capped = importance_weights(proximal, behavior, mode="truncate", cap=2.0)
    >>> weights.round(3).tolist(), capped.tolist()
    ([2.0, 0.5], [True, False])
    """
    if mode == "off":
        return np.ones_like(proximal), np.zeros(len(proximal), dtype=bool)
    if level == "sequence":
        ratio = np.full_like(proximal, np.exp(np.mean(proximal - behavior)))
    else:
        ratio = np.exp(proximal - behavior)
    above = ratio > cap
    if mode == "truncate":
        return np.minimum(ratio, cap), above
    # A NaN ratio is not masked: the gradient must show that something is wrong.
    outside = above | (ratio < 1 / cap)
    return np.where(outside, 0.0, ratio), outside
