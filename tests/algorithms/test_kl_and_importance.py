from __future__ import annotations

import numpy as np
import pytest

from windfall.algorithms.importance import importance_weights
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


# Ratios of proximal to behavior: 6, 1.5, 0.25.
PROXIMAL = np.log([0.6, 0.3, 0.1])
BEHAVIOR = np.log([0.1, 0.2, 0.4])


def test_truncation_caps_only_large_ratios() -> None:
    factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode="truncate", cap=2.0)
    assert factors == pytest.approx([2, 1.5, 0.25])  # no lower bound
    assert capped.tolist() == [True, False, False]


def test_mask_removes_tokens_on_both_sides() -> None:
    factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode="mask", cap=2.0)
    assert factors == pytest.approx([0, 1.5, 0])
    assert capped.tolist() == [True, False, True]
    factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode="mask", cap=5.0)  # 0.25 is above 1/5
    assert factors == pytest.approx([0, 1.5, 0.25])
    assert capped.tolist() == [True, False, False]


def test_off_changes_no_weight() -> None:
    factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode="off", cap=2.0)
    assert factors.tolist() == [1, 1, 1]
    assert not capped.any()


def test_sequence_level_weights_the_response_as_one() -> None:
    mean = (6 * 1.5 * 0.25) ** (1 / 3)  # 1.31
    for mode in ("truncate", "mask"):
        factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode=mode, cap=2.0, level="sequence")
        assert factors == pytest.approx([mean] * 3)
        assert not capped.any()
    factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode="truncate", cap=1.2, level="sequence")
    assert factors == pytest.approx([1.2] * 3)
    assert capped.all()
    factors, capped = importance_weights(PROXIMAL, BEHAVIOR, mode="mask", cap=1.2, level="sequence")
    assert factors.tolist() == [0] * 3
    assert capped.all()


def test_ratio_that_is_not_a_number_is_not_hidden() -> None:
    behavior = np.array([np.nan, 0.0])
    for mode in ("truncate", "mask"):
        factors, _ = importance_weights(np.zeros(2), behavior, mode=mode, cap=2.0)
        assert np.isnan(factors[0])
        assert factors[1] == 1
