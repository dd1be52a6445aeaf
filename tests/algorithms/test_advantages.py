"""Advantages, dynamic sampling and normalizers, against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from windfall.algorithms import ALGORITHMS, make
from windfall.algorithms.base import Outcome
from windfall.algorithms.dapo import DAPO

LIMIT = 100
GROUP_RELATIVE = ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo"]


def group(rewards: Sequence[float], lengths: Sequence[int] | None = None) -> list[Outcome]:
    lengths = lengths or [10] * len(rewards)
    return [Outcome(reward=r, length=n, limit=LIMIT) for r, n in zip(rewards, lengths, strict=True)]


# Rewards 3, 1, 1, 1: the mean is 1.5, the deviations 1.5, -0.5, -0.5, -0.5, the population variance
# (2.25 + 3 * 0.25) / 4 = 0.75, the deviation 0.8660254, so 1.5 / 0.8660254 = 1.7320508 and -0.5773503.
NORMALIZED = [1.7320508, -0.5773503, -0.5773503, -0.5773503]
# Without the division.
CENTERED = [1.5, -0.5, -0.5, -0.5]
# The siblings of the first have the mean 1, those of each other one (3 + 1 + 1) / 3: 3 - 1 = 2 and 1 - 5/3 = -2/3.
LEFT_OUT = [2.0, -2 / 3, -2 / 3, -2 / 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", NORMALIZED),
        ("dr_grpo", CENTERED),
        ("dapo", NORMALIZED),
        ("rloo", LEFT_OUT),
        ("gspo", NORMALIZED),
        ("cispo", NORMALIZED),
        # Equal lengths, one group: the tokens of the batch have the group's mean and deviation.
        ("reinforce_pp", NORMALIZED),
    ],
)
def test_advantages_of_one_group(name: str, expected: list[float]) -> None:
    [advantages] = make(name).advantages([group([3, 1, 1, 1])])
    assert advantages == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_are_independent(name: str) -> None:
    algorithm = make(name)
    assert algorithm.scope == "group"
    first, second = group([3, 1, 1, 1]), group([0, 8])
    both = algorithm.advantages([first, second])
    assert both == [*algorithm.advantages([first]), *algorithm.advantages([second])]
    assert [len(part) for part in both] == [4, 2]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[0.1, 0.1, 0.1], [0.7], []])
def test_equal_rewards_give_exactly_zero(name: str, rewards: list[float]) -> None:
    # In floating point the mean of three 0.1 is not 0.1: this error must not become an advantage.
    assert make(name).advantages([group(rewards)]) == [[0.0] * len(rewards)]


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "reinforce_pp"])
def test_rounding_errors_are_not_amplified(name: str) -> None:
    # Deviations of 5e-10 over 5e-10 + 1e-6: 0.0005, where the plain formula gives 1.
    [advantages] = make(name).advantages([group([0.0, 1e-9])])
    assert advantages == pytest.approx([-4.9975e-4, 4.9975e-4], rel=1e-3)


# Token counts 1, 3 | 2, 2 for rewards 1, 0 | 1, 1.
BATCH = [group([1, 0], [1, 3]), group([1, 1], [2, 2])]


def test_reinforce_pp_over_all_tokens_of_the_batch() -> None:
    # Five of the eight tokens have reward 1: mean 5/8, variance 5/8 * 3/8 = 0.234375, deviation 0.4841229;
    # 0.375 / 0.4841229 = 0.7745967 and -0.625 / 0.4841229 = -1.2909944.
    algorithm = make("reinforce_pp")
    assert algorithm.scope == "batch"
    first, second = algorithm.advantages(BATCH)
    assert first == pytest.approx([0.7745967, -1.2909944], rel=1e-5)
    assert second == pytest.approx([0.7745967, 0.7745967], rel=1e-5)


def test_reinforce_pp_with_the_mean_of_the_group_as_baseline() -> None:
    # Minus the group's mean: 0.5, -0.5 | 0, 0. The tokens' mean is (1 * 0.5 - 3 * 0.5) / 8 = -0.125; minus that,
    # 0.625, -0.375 | 0.125, 0.125; variance (0.390625 + 3 * 0.140625 + 4 * 0.015625) / 8 = 0.109375, deviation
    # 0.3307189; so 1.8898224, -1.1338934 | 0.3779645, 0.3779645.
    first, second = make("reinforce_pp", baseline="group").advantages(BATCH)
    assert first == pytest.approx([1.8898224, -1.1338934], rel=1e-5)
    assert second == pytest.approx([0.3779645, 0.3779645], rel=1e-5)


def test_reinforce_pp_without_groups() -> None:
    assert make("reinforce_pp").advantages([]) == []


# The limit is 100: with a cache of 20 the penalty starts after 80 tokens and is full at 100.
@pytest.mark.parametrize(("length", "penalty"), [(10, 0), (80, 0), (81, 0.05), (90, 0.5), (100, 1), (120, 1)])
def test_dapo_overlong_penalty(length: int, penalty: float) -> None:
    outcome = Outcome(reward=1.0, length=length, limit=LIMIT)
    assert DAPO(overlong_cache=20).shaped(outcome) == pytest.approx(1 - penalty)
    assert DAPO(overlong_cache=20, overlong_penalty=0.4).shaped(outcome) == pytest.approx(1 - 0.4 * penalty)
    assert DAPO().shaped(outcome) == 1


def test_dapo_penalty_changes_advantages_but_makes_no_group_informative() -> None:
    # Shaped rewards 1, 0.5, 0: mean 0.5, variance 0.5 / 3, deviation 0.4082483, 0.5 / 0.4082483 = 1.2247449.
    solved = group([1, 1, 1], [80, 90, 100])
    algorithm = make("dapo", overlong_cache=20)
    [advantages] = algorithm.advantages([solved])
    assert advantages == pytest.approx([1.2247449, 0, -1.2247449], rel=1e-5)
    assert not algorithm.informative(solved)


def test_dapo_group_with_equal_shaped_but_unequal_rewards_is_informative() -> None:
    # 1 - 0.5 and 0.5 - 0: the shaped rewards are equal, the rewards are not.
    leveled = group([1, 0.5], [90, 80])
    algorithm = make("dapo", overlong_cache=20)
    assert algorithm.advantages([leveled]) == [[0, 0]]
    assert algorithm.informative(leveled)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[1, 1, 1], [0, 0], [1], [1, 0]])
def test_only_dapo_replaces_groups(name: str, rewards: list[float]) -> None:
    assert make(name).informative(group(rewards)) is (name != "dapo" or rewards == [1, 0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", 1),  # mean over responses, the mean over tokens is in the weights
        ("dr_grpo", 100),  # mean over responses, and a constant
        ("dapo", 7),  # mean over tokens
        ("rloo", 1),  # mean over responses of a sum
        ("reinforce_pp", 7),
        ("gspo", 1),
        ("cispo", 7),
    ],
)
def test_normalizer(name: str, expected: float) -> None:
    assert make(name).normalizer(length=7, limit=LIMIT) == expected


def test_penalty_counts_the_tokens_of_the_environment() -> None:
    """Truncated at the limit of 100, with 70 tokens of the environment: the full penalty."""
    dapo = DAPO(overlong_cache=20, overlong_penalty=0.5)
    assert dapo.shaped(Outcome(reward=1.0, length=30, limit=LIMIT, observed=70)) == 0.5
    assert dapo.shaped(Outcome(reward=1.0, length=30, limit=LIMIT, observed=60)) == 0.75
    assert dapo.shaped(Outcome(reward=1.0, length=30, limit=LIMIT)) == 1.0
