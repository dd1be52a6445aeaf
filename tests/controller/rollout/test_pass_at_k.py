from __future__ import annotations

import itertools
import math

import pytest

from windfall.controller.rollout.evaluation import describe_passes, mean_pass_at, pass_at_k
from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe


def test_the_estimate_is_the_mean_over_all_selections() -> None:
    for n in range(1, 8):
        for passed, k in itertools.product(range(n + 1), range(1, n + 1)):
            picks = list(itertools.combinations([True] * passed + [False] * (n - passed), k))
            assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, picks)) / len(picks))
    with pytest.raises(ValueError, match=r"pass@3 of 2"):
        pass_at_k(2, 1, 3)


def test_tasks_with_missing_rewards_are_left_out_and_counted() -> None:
    rewards = [(1.0, 0.0, 1.2, 0.9), (0.0, 0.0, 0.0), (1.0,)]
    assert mean_pass_at(rewards, 1, 1.0) == (pytest.approx((0.5 + 0.0 + 1.0) / 3), 3)
    assert mean_pass_at(rewards, 3, 1.0) == (pytest.approx((1.0 + 0.0) / 2), 2)
    assert math.isnan(mean_pass_at(rewards, 5, 1.0)[0])
    options = parse_recipe({"eval": {"pass_at": [3, 1], "responses": 4}}, where="test").eval
    said = describe_passes(options, rewards)
    assert list(said["pass_at"]) == ["1", "3"]
    assert said["pass_left_out"] == {"3": 1}
    assert describe_passes(parse_recipe({}, where="test").eval, [(1.0,)]) == {}


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"pass_at": [8], "responses": 4}, "pass@8 needs at least as many responses, not 4"),
        ({"pass_at": [2], "temperature": 0.0}, "all responses to a task are the same"),
        ({"pass_at": [0]}, "greater than or equal to 1"),
        ({"path": "test.jsonl"}, "eval.path needs env.name = 'dataset'"),
    ],
)
def test_impossible_sections_are_refused(section: dict, says: str) -> None:
    with pytest.raises(WindfallError, match=says):
        parse_recipe({"eval": section}, where="test")
