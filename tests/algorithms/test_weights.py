"""The weight of each token, against numbers computed by hand: both sides of every clip, for both signs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from windfall.algorithms import ALGORITHMS, make
from windfall.algorithms.base import SampledTokens


def weights(name: str, ratios: list[float], advantage: float, **options: Any) -> np.ndarray:
    """The weights of tokens with these ratios of new to old probability."""
    old = np.log(np.linspace(0.01, 0.03, len(ratios)))
    return make(name, **options).weights(SampledTokens(logp=old + np.log(ratios), proximal=old, advantage=advantage))


# With a clip of 0.2 the range is 0.8 to 1.2. A good response: only 1.5 is clipped. A bad one: only 0.5.
RATIOS = [0.5, 0.9, 1.0, 1.1, 1.5]
GOOD = np.array([1.0, 1.8, 2.0, 2.2, 0.0])  # 2 r
BAD = np.array([0.0, -1.8, -2.0, -2.2, -3.0])  # -2 r


@pytest.mark.parametrize("name", ["dr_grpo", "reinforce_pp"])
def test_ppo_clip(name: str) -> None:
    assert weights(name, RATIOS, 2.0) == pytest.approx(GOOD)
    assert weights(name, RATIOS, -2.0) == pytest.approx(BAD)
    # 0.6 widens the range to 0.4 .. 1.6: nothing is clipped.
    assert weights(name, RATIOS, -2.0, clip=0.6) == pytest.approx([-1.0, -1.8, -2.0, -2.2, -3.0])


def test_grpo_is_a_mean_over_the_response() -> None:
    assert weights("grpo", RATIOS, 2.0) == pytest.approx(GOOD / 5)
    assert weights("grpo", RATIOS, -2.0) == pytest.approx(BAD / 5)
    assert weights("grpo", RATIOS, 2.0, clip=0.6) == pytest.approx([0.2, 0.36, 0.4, 0.44, 0.6])


def test_dapo_clips_higher() -> None:
    # The range is 0.8 to 1.28: 1.25 passes where the symmetric clip would stop it.
    assert weights("dapo", [0.75, 0.85, 1.25, 1.3], 1.0) == pytest.approx([0.75, 0.85, 1.25, 0])
    assert weights("dapo", [0.75, 0.85, 1.25, 1.3], -1.0) == pytest.approx([0, -0.85, -1.25, -1.3])
    assert weights("dapo", [0.75, 1.3], -1.0, clip_low=0.3) == pytest.approx([-0.75, -1.3])
    assert weights("dapo", [0.75, 1.3], 1.0, clip_high=0.4) == pytest.approx([0.75, 1.3])


def test_rloo_ignores_ratios() -> None:
    assert weights("rloo", [0.01, 1.0, 50.0], -0.5).tolist() == [-0.5, -0.5, -0.5]


@pytest.mark.parametrize(
    ("s", "good", "bad"),
    [
        (0.9996, 0.9996, 0.0),  # below 1 - 3e-4
        (0.99965, 0.99965, 0.0),  # below it too, though not below 1 - 4e-4
        (0.9998, 0.9998, -0.9998),
        (1.0002, 1.0002, -1.0002),
        (1.00035, 1.00035, -1.00035),  # above 1 + 3e-4, not above 1 + 4e-4
        (1.0005, 0.0, -1.0005),
    ],
)
def test_gspo_clips_the_response(s: float, good: float, bad: float) -> None:
    # Ratios 4 s^2 and 1/4: their geometric mean is s, however far each of them is from 1. w = +-2 s / 2.
    ratios = [4 * s * s, 0.25]
    assert weights("gspo", ratios, 2.0) == pytest.approx([good, good], rel=1e-9)
    assert weights("gspo", ratios, -2.0) == pytest.approx([bad, bad], rel=1e-9)


def test_gspo_clip_options() -> None:
    # s = sqrt(1.44) = 1.2 lies inside 1 +- 0.5, and sqrt(0.36) = 0.6 does.
    assert weights("gspo", [1.44, 1.0], 1.0, clip_high=0.5) == pytest.approx([0.6, 0.6])
    assert weights("gspo", [0.36, 1.0], -1.0, clip_low=0.5) == pytest.approx([-0.3, -0.3])


def test_cispo_bounds_the_weight_and_drops_no_token() -> None:
    # At most 5, and no lower bound.
    assert weights("cispo", [0.01, 1.0, 4.5, 20.0], 2.0) == pytest.approx([0.02, 2, 9, 10])
    assert weights("cispo", [0.01, 1.0, 4.5, 20.0], -2.0) == pytest.approx([-0.02, -2, -9, -10])
    assert weights("cispo", [0.01, 20.0], 2.0, clip_low=0.2, clip_high=0.28) == pytest.approx([1.6, 2.56])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_is_clipped_on_policy(name: str) -> None:
    per_token = 4 if name in ("grpo", "gspo") else 1
    assert weights(name, [1.0] * 4, -3.0) == pytest.approx([-3 / per_token] * 4)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_keep_the_precision_of_the_log_probs(name: str) -> None:
    logp = np.log(np.array([0.1, 0.2], dtype=np.float32))
    assert make(name).weights(SampledTokens(logp=logp, proximal=logp, advantage=1.0)).dtype == np.float32
