"""A pull towards a reference policy, added to the weights of any algorithm.

The estimator is k3 ("Approximating KL Divergence", J. Schulman, 2020; used by GRPO, arXiv 2402.03300): per sampled
token, never negative, and on average KL(pi || ref) when the token was drawn from pi. (Its gradient, on average, is that
of KL(ref || pi): it has the same minimum.)

    k3        = exp(ref - logp) - (ref - logp) - 1
    d k3      = (1 - exp(ref - logp)) d logp
    loss     += beta sum_i n_i mean_t k3_t / sum_i n_i          n_i: the algorithm's normaliser of response i
    w_t      += - beta n_i / |y_i| (1 - exp(ref - logp_t))      as gradient of the loss = - sum_t w_t grad logp_t

A token likelier than under the reference is pushed down, a less likely one up. Only sampled tokens count. The mean is
over the tokens of the mini-batch where n_i = |y_i| (DAPO, REINFORCE++, CISPO). Elsewhere all n_i are equal, and it is
the mean over the responses of the mini-batch of each one's mean over its tokens, as in GRPO's paper.
"""

from __future__ import annotations

import numpy as np

from windfall.algorithms.base import Floats


def k3(logp: Floats, ref: Floats) -> Floats:
    """The estimate itself, to be logged. expm1, because close to the reference the terms cancel."""
    return np.expm1(ref - logp) - (ref - logp)


def kl_weights(logp: Floats, ref: Floats, beta: float) -> Floats:
    """To be added to `Algorithm.weights`, after any importance factor: a penalty is no credit for a sampled reward."""
    return beta * np.expm1(ref - logp)
