"""Truncated importance sampling: a factor on the weights of tokens that were sampled from a slightly different policy.

Rollout and training compute the same model with different kernels, different precision or (if staleness is allowed)
older weights. So the log-prob with which a token was sampled, `behavior`, differs from the log-prob that the trainer
computes for the policy from which the step started, `old`. Source: F. Yao et al., "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training", 2025 (fengyao.notion.site/off-policy-rl).

    w_t  *=  min(exp(old_t - behavior_t), cap)

The factor is a constant; the algorithm's own ratio pi / pi_old does not change. The cap bounds the variance at the
price of a small bias. There is no lower bound: a token that is unlikely under `old` gets a small weight.
"""

from __future__ import annotations

import numpy as np

from windfall.algorithms.base import Floats


def truncated_importance(old: Floats, behavior: Floats, cap: float) -> Floats:
    """Factors for `Algorithm.weights`, one per token.

    >>> truncated_importance(np.log([0.5, 0.2]), np.log([0.1, 0.4]), cap=2.0).round(3).tolist()
    [2.0, 0.5]
    """
    return np.minimum(np.exp(old - behavior), cap)
