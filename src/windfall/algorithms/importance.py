"""A factor on the weights for tokens that came from another policy than the trainer believes.

Rollout and training compute the same model with other kernels, other precision or (when staleness is allowed) older
weights, so a token's log-prob when it was made, `behaviour`, is not the one the trainer computes for the policy that
the step started from, `old`. Truncated importance sampling: F. Yao et al., "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training", 2025 (fengyao.notion.site/off-policy-rl).

    w_t  *=  min(exp(old_t - behaviour_t), cap)

The factor is a constant beside the algorithm's own ratio pi / pi_old, which stays as it is. The cap bounds the variance
at the price of a small bias; there is no lower bound, a token that is now unlikely counts for little.
"""

from __future__ import annotations

import numpy as np

from windfall.algorithms.base import Floats


def truncated_importance(old: Floats, behaviour: Floats, cap: float) -> Floats:
    """To be multiplied with `Algorithm.weights`, token by token.

    >>> truncated_importance(np.log([0.5, 0.2]), np.log([0.1, 0.4]), cap=2.0).round(3).tolist()
    [2.0, 0.5]
    """
    return np.minimum(np.exp(old - behaviour), cap)
