from __future__ import annotations

import numpy as np
import pytest

from windfall.algorithms.importance import truncated_importance
from windfall.algorithms.kl import k3, kl_weights

# ref / pi is 1/2, 1 and 2.
LOGP = np.log([0.5, 0.3, 0.25])
REF = np.log([0.25, 0.3, 0.5])


def test_k3_values() -> None:
    # 1/2 + ln 2 - 1, 1 - 0 - 1, 2 - ln 2 - 1
    assert k3(LOGP, REF) == pytest.approx([0.1931472, 0, 0.3068528], abs=1e-7)


def test_k3_close_to_the_reference() -> None:
    # x^2 / 2 for a small x; the plain e^x - x - 1 would lose all digits.
    assert k3(np.array([0.0]), np.array([1e-9])) == pytest.approx([5e-19], rel=1e-6, abs=0)


def test_mean_of_k3_is_the_divergence() -> None:
    # KL(pi || ref) for pi = 0.8, 0.2 and ref = 0.5, 0.5: 0.8 ln 1.6 + 0.2 ln 0.4 = 0.1927448.
    pi, ref = np.array([0.8, 0.2]), np.array([0.5, 0.5])
    assert np.sum(pi * k3(np.log(pi), np.log(ref))) == pytest.approx(0.1927448, abs=1e-7)


def test_kl_weights_pull_towards_the_reference() -> None:
    # -0.1 (1 - 1/2): more likely than under the reference, pushed down. 0. -0.1 (1 - 2): pushed up.
    assert kl_weights(LOGP, REF, beta=0.1) == pytest.approx([-0.05, 0, 0.1])


def test_truncated_importance_caps_only_large_ratios() -> None:
    # 0.6 / 0.1 = 6 is capped at 2; 0.3 / 0.2 = 1.5; 0.1 / 0.4 = 0.25 has no lower bound.
    factors = truncated_importance(np.log([0.6, 0.3, 0.1]), np.log([0.1, 0.2, 0.4]), cap=2.0)
    assert factors == pytest.approx([2, 1.5, 0.25])
