"""Lengths are predicted from siblings, progress and earlier epochs, with an error that is measured; the order of the
queue follows from them."""

from __future__ import annotations

import math
import random

import pytest

from windfall.controller.scheduling.lengths import MAX_TASKS, LengthPredictor
from windfall.controller.scheduling.order import by_context


def learned(alike: float, *, groups: int = 400, size: int = 8, sigma: float = 0.8, seed: int = 0) -> LengthPredictor:
    """A predictor that has seen log-normal lengths with this within-group correlation."""
    lengths, draw = LengthPredictor(), random.Random(seed)
    for group in range(groups):
        common = draw.gauss(0, 1)
        for _ in range(size):
            normal = math.sqrt(alike) * common + math.sqrt(1 - alike) * draw.gauss(0, 1)
            lengths.finished(str(group), group, round(1000 * math.exp(sigma * normal)))
        lengths.complete(str(group))
    return lengths


@pytest.mark.parametrize("alike", [0.0, 0.3, 0.7, 0.95])
def test_within_group_correlation_is_learned(alike: float) -> None:
    assert learned(alike).alike == pytest.approx(alike, abs=0.08)


def test_siblings_halve_the_error_if_they_are_alike_and_do_no_harm_if_not() -> None:
    alike, unlike = learned(0.9), learned(0.0)
    assert alike.error < 0.5 * alike.error_without
    assert unlike.error == pytest.approx(unlike.error_without, rel=0.1)
    assert alike.describe() == {"alike": alike.alike, "error": alike.error, "error_without": alike.error_without}
    assert LengthPredictor().describe() == {}


def test_expected_length_is_the_mean_above_what_a_response_has() -> None:
    lengths, draw = learned(0.0), random.Random(1)
    drawn = [1000 * math.exp(0.8 * draw.gauss(0, 1)) for _ in range(200_000)]
    for generated in (0, 500, 2000, 5000):
        longer = [x for x in drawn if x > generated]
        assert lengths.expected("new", "new", generated) == pytest.approx(sum(longer) / len(longer), rel=0.12)
    assert 1e7 < lengths.expected("new", "new", 10**7) < 2e7, "far in the tail"


def test_earlier_epochs_of_a_task_count_and_are_bounded() -> None:
    lengths = learned(0.8)
    for sibling in range(4):
        lengths.finished("long", "task", 20_000 + sibling)
    lengths.complete("long")
    assert lengths.expected("again", "task") > 3 * lengths.expected("other", "unseen")
    assert lengths.order_length("again", "task", 50_000) == 20_003
    assert lengths.order_length("other", "unseen", 50_000) == 50_000, "a group counts as long until one has ended"
    lengths.finished("other", "unseen", 700)
    lengths.finished("other", "unseen", 300)
    assert lengths.order_length("other", "unseen", 50_000) == 700
    for task in range(MAX_TASKS + 5):
        lengths.finished("g", task, 10)
        lengths.complete("g")
    assert lengths.order_length("again", "task", 50_000) == 50_000, "forgotten"


def test_nothing_is_left_of_a_group() -> None:
    lengths = LengthPredictor()
    assert lengths.expected("1", 1) == 0.0
    lengths.complete("1")
    assert not lengths._groups


def test_older_steps_come_first_and_the_head_of_the_queue_stays() -> None:
    queued = ["9/3", "4/1", "4/2", "0/1", "0/2", "1/0", "1/1", "5/0"]
    lengths = {"4/1": 9000.0, "0/1": 10.0, "1/0": 500.0, "5/0": 500.0}
    order = by_context(queued, 8, begun={"4", "0", "9"}, length=lengths.__getitem__, step=lambda g: int(g) // 4, head=1)
    assert order == ["9/3", "1/0", "1/1", "0/1", "0/2", "5/0", "4/1", "4/2"]
    assert by_context(queued, 3, begun=set(), length=lengths.__getitem__, head=5) == queued[:3]
