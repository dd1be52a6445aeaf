"""A KL penalty toward a reference policy, added to the weights of any algorithm.

The estimator is k3 ("Approximating KL Divergence", J. Schulman, 2020; used by GRPO, arXiv 2402.03300): it is never
negative, and its mean is KL(pi || ref) if the tokens are sampled from pi.

    k3        = exp(ref - logp) - (ref - logp) - 1
    loss     += beta sum_i n_i mean_t k3_t / sum_i n_i          n_i: the algorithm's normalizer of response i
    w_t      += - beta n_i / |y_i| (1 - exp(ref - logp_t))      as grad loss = - sum_t w_t grad logp_t
"""

from __future__ import annotations

import numpy as np

from windfall.algorithms.base import Floats


def k3(logp: Floats, ref: Floats) -> Floats:
    """The estimate itself, for the log. It uses expm1 because the terms nearly cancel close to the reference."""
    return np.expm1(ref - logp) - (ref - logp)


def kl_weights(logp: Floats, ref: Floats, beta: float) -> Floats:
    """Add these to `Algorithm.weights` after importance factors are applied: those are for credit, not a penalty."""
    return beta * np.expm1(ref - logp)
