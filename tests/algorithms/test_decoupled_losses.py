"""Off-policy tokens: weights of an algorithm times importance weights are the gradient of its decoupled loss.

The losses below are written in plain torch from rewards and the log-probs of three policies: the one that sampled
(`behavior`: the first third of a response is two versions old, the second third one version, the rest is fresh), the
one at the start of the step (`proximal`) and the current one. They use neither weights nor factors of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from windfall.algorithms import ALGORITHMS, make
from windfall.algorithms.base import Outcome, SampledTokens
from windfall.algorithms.importance import importance_weights

Mode = Literal["truncate", "mask", "off"]
LIMIT = 12
LENGTHS = [[3, 7, 4], [12, 3, 10], [5, 6, 8]]
CAP = {"gspo": 1.1}
"""The geometric mean over a response is closer to 1 than the ratio of a token, so a lower cap is needed to act."""
CAPS = {name: CAP.get(name, 1.5) for name in ALGORITHMS}
SPREAD = {"gspo": 1e-3, "cispo": 1.5}
"""How far the current policy is from the proximal one: far enough to clip. 0.4 for the others."""


@dataclass(frozen=True, kw_only=True)
class TokenLogProbs:
    """One response under three policies; `current` has a gradient."""

    current: Tensor
    proximal: Tensor
    behavior: Tensor
    reward: float


def draw(name: str, seed: int) -> list[list[TokenLogProbs]]:
    rng = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=rng, dtype=torch.float64)

    def response(n: int) -> TokenLogProbs:
        proximal = -normal(n).abs() - 0.1
        lag = torch.arange(n).mul(3).div(n, rounding_mode="floor").neg().add(2)  # 2, ..., 1, ..., 0, ...
        # Each version drifts on its own, and all tokens of a version have a drift in common.
        drift = lag * (0.4 * normal(n) + 0.2 * normal(1))
        current = (proximal + SPREAD.get(name, 0.4) * normal(n)).requires_grad_()
        return TokenLogProbs(current=current, proximal=proximal, behavior=proximal - drift, reward=float(normal(1)))

    return [[response(n) for n in lengths] for lengths in LENGTHS]


def trust(ratio: Tensor, mode: Mode, cap: float) -> Tensor:
    """The importance weight of a token or a response. It multiplies a term of the loss and has no gradient."""
    match mode:
        case "truncate":
            return ratio.clamp(max=cap)
        case "mask":
            return ratio * ((ratio <= cap) & (ratio * cap >= 1))
        case "off":
            return torch.ones_like(ratio)


Loss = Callable[[list[list[TokenLogProbs]], Mode, float], Tensor]


def scores(group: list[TokenLogProbs]) -> Tensor:
    return torch.tensor([r.reward for r in group], dtype=torch.float64)


def standard(values: Tensor) -> Tensor:
    return (values - values.mean()) / (values.std(correction=0) + 1e-6)


def decoupled_ppo(r: TokenLogProbs, advantage: Tensor, low: float, high: float, mode: Mode, cap: float) -> Tensor:
    """AReaL's objective per token: pi_prox / pi_behav * min(u A, clip(u) A), with u = pi / pi_prox."""
    u = r.current.exp() / r.proximal.exp()
    v = trust(r.proximal.exp() / r.behavior.exp(), mode, cap)
    return v * torch.minimum(u * advantage, u.clamp(1 - low, 1 + high) * advantage)


def grpo(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    terms = [
        decoupled_ppo(r, a, 0.2, 0.2, mode, cap).mean()
        for g in groups
        for r, a in zip(g, standard(scores(g)), strict=True)
    ]
    return -torch.stack(terms).mean()


def dr_grpo(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    terms = [
        decoupled_ppo(r, a, 0.2, 0.2, mode, cap).sum() / LIMIT
        for g in groups
        for r, a in zip(g, scores(g) - scores(g).mean(), strict=True)
    ]
    return -torch.stack(terms).mean()


def dapo(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    terms = [
        decoupled_ppo(r, a, 0.2, 0.28, mode, cap) for g in groups for r, a in zip(g, standard(scores(g)), strict=True)
    ]
    return -torch.cat(terms).mean()


def rloo(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    """REINFORCE with the mean reward of the siblings as the baseline."""
    terms = []
    for g in groups:
        for i, r in enumerate(g):
            baseline = sum(x.reward for j, x in enumerate(g) if j != i) / (len(g) - 1)
            v = trust((r.proximal - r.behavior).exp(), mode, cap)
            terms.append((r.reward - baseline) * (v * r.current).sum())
    return -torch.stack(terms).mean()


def reinforce_pp(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    flat = [r for g in groups for r in g]
    advantages = standard(torch.cat([torch.full((len(r.current),), r.reward, dtype=torch.float64) for r in flat]))
    joined = TokenLogProbs(
        current=torch.cat([r.current for r in flat]), proximal=torch.cat([r.proximal for r in flat]),
        behavior=torch.cat([r.behavior for r in flat]), reward=0.0,
    )  # fmt: skip
    return -decoupled_ppo(joined, advantages, 0.2, 0.2, mode, cap).mean()


def gspo(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    """Both ratios are of whole responses, to the power of 1 / length."""
    terms = []
    for g in groups:
        for r, a in zip(g, standard(scores(g)), strict=True):
            n = len(r.current)
            s = (r.current.sum().exp() / r.proximal.sum().exp()) ** (1 / n)
            v = trust((r.proximal.sum().exp() / r.behavior.sum().exp()) ** (1 / n), mode, cap)
            terms.append(v * torch.minimum(s * a, s.clamp(1 - 3e-4, 1 + 4e-4) * a))
    return -torch.stack(terms).mean()


def cispo(groups: list[list[TokenLogProbs]], mode: Mode, cap: float) -> Tensor:
    terms = []
    for g in groups:
        for r, a in zip(g, standard(scores(g)), strict=True):
            c = (r.current.detach() - r.proximal).exp().clamp(max=5.0)
            terms.append(trust((r.proximal - r.behavior).exp(), mode, cap) * c * a * r.current)
    return -torch.cat(terms).mean()


LOSSES: dict[str, Loss] = {
    "grpo": grpo, "dr_grpo": dr_grpo, "dapo": dapo, "rloo": rloo, "reinforce_pp": reinforce_pp, "gspo": gspo,
    "cispo": cispo,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["truncate", "mask", "off"])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_weights_are_the_gradient_of_the_decoupled_loss(name: str, mode: Mode) -> None:
    capped_share = []
    for seed in range(4):
        groups = draw(name, seed)
        algorithm, flat = make(name), [r for g in groups for r in g]
        outcomes = [[Outcome(reward=r.reward, length=len(r.current), limit=LIMIT) for r in g] for g in groups]
        advantages = [a for row in algorithm.advantages(outcomes) for a in row]
        weights, capped = [], []
        for r, a in zip(flat, advantages, strict=True):
            current, proximal, behavior = (x.detach().numpy() for x in (r.current, r.proximal, r.behavior))
            w = algorithm.weights(SampledTokens(logp=current, proximal=proximal, advantage=a))
            factors, hit = importance_weights(
                proximal, behavior, mode=mode, cap=CAPS[name], level=algorithm.importance_level
            )
            weights.append(w * factors)
            capped.append(hit)
        divisor = sum(algorithm.normalizer(length=len(r.current), limit=LIMIT) for r in flat)
        loss = LOSSES[name](groups, mode, CAPS[name])
        expected = torch.cat(torch.autograd.grad(loss, [r.current for r in flat])).numpy()
        np.testing.assert_allclose(-np.concatenate(weights) / divisor, expected, rtol=1e-9, atol=1e-14)
        capped_share.append(np.concatenate(capped).mean())
    if mode == "off":
        assert capped_share == [0] * 4
    else:
        assert 0 < np.mean(capped_share) < 0.6, "the cap must act on some tokens, but not on most"


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"gspo"}))  # a geometric mean is biased by design
def test_unbounded_weights_move_the_expectation_to_the_current_policy(name: str) -> None:
    """One token of a vocabulary of three, sampled by an old policy: with the importance weight, the expected gradient
    is the on-policy one. Without it, it is another one."""
    behavior, proximal = np.log([0.5, 0.3, 0.2]), np.log([0.2, 0.3, 0.5])
    rewards = np.array([1.0, 0.0, -1.0])

    def expected(policy: np.ndarray, mode: Mode, sampled_by: np.ndarray) -> np.ndarray:
        """Expected weight on the log-prob of each token, if `sampled_by` draws them."""
        out = np.zeros(3)
        for token in range(3):
            at = slice(token, token + 1)
            w = make(name).weights(SampledTokens(logp=policy[at], proximal=policy[at], advantage=float(rewards[token])))
            factors, _ = importance_weights(policy[at], sampled_by[at], mode=mode, cap=1e9)
            out[token] = np.exp(sampled_by[token]) * float((w * factors)[0])
        return out

    on_policy = expected(proximal, "truncate", proximal)
    np.testing.assert_allclose(expected(proximal, "truncate", behavior), on_policy, rtol=1e-12)
    assert np.abs(expected(proximal, "off", behavior) - on_policy).max() > 0.1
