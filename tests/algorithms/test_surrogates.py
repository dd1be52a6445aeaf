"""The weights of every algorithm are the gradient of its loss as the paper writes it, differentiated by torch.

The losses below start from rewards and do not use weights. Responses have unequal lengths and groups have equal sizes,
as in the papers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from windfall.algorithms import ALGORITHMS, make
from windfall.algorithms.base import EPS, Outcome, SampledTokens
from windfall.algorithms.importance import importance_weights
from windfall.algorithms.kl import kl_weights

LIMIT = 12
LENGTHS = [[2, 7, 4], [12, 3, 10], [5, 1, 8], [6, 11, 9]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Nested by group and response, `logp` with gradients."""

    logp: list[list[Tensor]]
    old: list[list[Tensor]]
    rewards: list[Tensor]


def draw(seed: int, spread: float) -> Batch:
    rng = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=rng, dtype=torch.float64)

    old = [[-normal(n).abs() for n in lengths] for lengths in LENGTHS]
    logp = [[(o + spread * normal(len(o))).requires_grad_() for o in group] for group in old]
    return Batch(logp=logp, old=old, rewards=[normal(len(lengths)) for lengths in LENGTHS])


def standard(values: Tensor) -> Tensor:
    return (values - values.mean()) / (values.std(correction=0) + EPS)


def ppo(logp: Tensor, old: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    r = torch.exp(logp - old)
    return torch.min(r * advantage, r.clamp(1 - low, 1 + high) * advantage)


def responses(batch: Batch, advantages: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [
        (batch.logp[g][i], batch.old[g][i], advantages[g][i])
        for g in range(len(LENGTHS))
        for i in range(len(LENGTHS[g]))
    ]


def mean(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).mean()


def grpo(batch: Batch) -> Tensor:
    each = responses(batch, [standard(r) for r in batch.rewards])
    return -mean([ppo(x, old, a, 0.2, 0.2).mean() for x, old, a in each])


def dr_grpo(batch: Batch) -> Tensor:
    each = responses(batch, [r - r.mean() for r in batch.rewards])
    return -mean([ppo(x, old, a, 0.2, 0.2).sum() / LIMIT for x, old, a in each])


def dapo(batch: Batch) -> Tensor:
    each = responses(batch, [standard(r) for r in batch.rewards])
    return -torch.cat([ppo(x, old, a, 0.2, 0.28) for x, old, a in each]).mean()


def rloo(batch: Batch) -> Tensor:
    others = [torch.stack([torch.cat([r[:i], r[i + 1 :]]).mean() for i in range(len(r))]) for r in batch.rewards]
    each = responses(batch, [r - b for r, b in zip(batch.rewards, others, strict=True)])
    return -mean([a * x.sum() for x, _, a in each])


def reinforce_pp(batch: Batch) -> Tensor:
    each = responses(batch, batch.rewards)
    per_token = torch.cat([r.expand(len(x)) for x, _, r in each])
    x, old = torch.cat([x for x, _, _ in each]), torch.cat([old for _, old, _ in each])
    return -ppo(x, old, standard(per_token), 0.2, 0.2).mean()


def gspo(batch: Batch) -> Tensor:
    each = responses(batch, [standard(r) for r in batch.rewards])
    s = [(torch.exp(x.sum()) / torch.exp(old.sum())) ** (1 / len(x)) for x, old, _ in each]
    pairs = [(s, a) for s, (_, _, a) in zip(s, each, strict=True)]
    return -mean([torch.min(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a) for s, a in pairs])


def cispo(batch: Batch) -> Tensor:
    each = responses(batch, [standard(r) for r in batch.rewards])
    return -torch.cat([torch.exp(x - old).clamp(0, 5).detach() * a * x for x, old, a in each]).mean()


LOSSES: dict[str, Callable[[Batch], Tensor]] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "gspo": gspo,
    "cispo": cispo,
}


def weighted(name: str, batch: Batch) -> tuple[list[np.ndarray], float]:
    """The weights of all responses, in order, and the sum of the normalizers."""
    algorithm = make(name)
    outcomes = [
        [Outcome(reward=float(r), length=n, limit=LIMIT) for r, n in zip(rewards, lengths, strict=True)]
        for rewards, lengths in zip(batch.rewards, LENGTHS, strict=True)
    ]
    advantages = [torch.tensor(a, dtype=torch.float64) for a in algorithm.advantages(outcomes)]
    each = [
        algorithm.weights(SampledTokens(logp=x.detach().numpy(), proximal=old.numpy(), advantage=float(a)))
        for x, old, a in responses(batch, advantages)
    ]
    return each, sum(algorithm.normalizer(length=n, limit=LIMIT) for lengths in LENGTHS for n in lengths)


def gradient(batch: Batch, loss: Tensor) -> np.ndarray:
    return torch.cat(torch.autograd.grad(loss, [x for group in batch.logp for x in group])).numpy()


# How far the log-probs have moved: far enough to clip many tokens. GSPO clips the ratio of a response at a few 1e-4,
# CISPO clips a weight at 5.
SPREAD = {"gspo": 1e-3, "cispo": 1.5}


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_gradient_of_the_loss(name: str, seed: int) -> None:
    batch = draw(seed, SPREAD.get(name, 0.4))
    each, divisor = weighted(name, batch)
    expected = gradient(batch, LOSSES[name](batch))
    assert np.any(expected != 0)
    if name == "cispo":
        assert max((x - old).max().item() for x, old, _ in responses(batch, batch.rewards)) > np.log(5)
    elif name != "rloo":
        assert np.any(expected == 0), "no token was clipped, so this batch does not test the clip"
    np.testing.assert_allclose(-np.concatenate(each) / divisor, expected, rtol=1e-9, atol=1e-14)


def test_kl_inside_the_mean_of_grpo() -> None:
    batch, beta = draw(0, 0.4), 0.04
    refs = [x.detach() + 0.3 * torch.cos(torch.arange(len(x))) for group in batch.logp for x in group]
    logps = [x for group in batch.logp for x in group]
    kl = [torch.exp(ref - x) - (ref - x) - 1 for x, ref in zip(logps, refs, strict=True)]
    expected = gradient(batch, grpo(batch) + beta * mean([k.mean() for k in kl]))
    each, divisor = weighted("grpo", batch)
    each = [
        w + kl_weights(x.detach().numpy(), ref.numpy(), beta / len(w))
        for w, x, ref in zip(each, logps, refs, strict=True)
    ]
    np.testing.assert_allclose(-np.concatenate(each) / divisor, expected, rtol=1e-9, atol=1e-14)


def test_truncated_importance_multiplies_the_terms_of_dapo() -> None:
    batch = draw(1, 0.4)
    each = responses(batch, [standard(r) for r in batch.rewards])
    behaviors = [old + 0.8 * torch.sin(torch.arange(len(old))) for _, old, _ in each]
    factors = [torch.exp(old - b).clamp(max=1.5) for (_, old, _), b in zip(each, behaviors, strict=True)]
    assert any(1.5 in f for f in factors)
    assert any((f < 1.5).any() for f in factors)
    terms = [f * ppo(x, old, a, 0.2, 0.28) for f, (x, old, a) in zip(factors, each, strict=True)]
    expected = gradient(batch, -torch.cat(terms).mean())
    weights, divisor = weighted("dapo", batch)
    corrected = [
        w * importance_weights(old.numpy(), b.numpy(), mode="truncate", cap=1.5)[0]
        for w, (_, old, _), b in zip(weights, each, behaviors, strict=True)
    ]
    np.testing.assert_allclose(-np.concatenate(corrected) / divisor, expected, rtol=1e-9, atol=1e-14)
