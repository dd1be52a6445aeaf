"""A pull towards a reference policy, added to the weights of any algorithm.

The estimator is k3 ("Approximating KL Divergence", J. Schulman, 2020; used by GRPO, arXiv 2402.03300): per sampled
token, never negative, and on average KL(pi || ref) when the token was drawn from pi. (Its gradient, on average, is that
of KL(ref || pi): it has the same minimum.)

    k3        = exp(ref - logp) - (ref - logp) - 1
    d k3      = (1 - exp(ref - logp)) d logp
    loss     += beta sum_t k3_t           so, as gradient of the loss = - sum_t w_t grad logp_t:
    w_t      += - beta (1 - exp(ref - logp_t))

A token likelier than under the reference is pushed down, a less likely one up. The term is divided by the same
normaliser as the rest: in a token-level algorithm beta is per token; one whose normaliser is 1 per response sums it
over the response, unless beta / |y| is passed to average it there, as GRPO does.
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
