"""How many tokens to draft, on a simulated device whose step times and acceptance are known: what is chosen never loses
more than 2 %, gains almost what the best width would gain, and follows changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from tests.support.quick_cases import quick_cases
from windfall.engine.draft_length import MEMORY, MIN_TOKENS, PROBE, RETRY, WIDTHS, DraftLength
from windfall.engine.drafts import RUNS, count_run


class Simulated:
    """Responses whose next token is as expected with probability `right`. A step of width w takes 1 + extra(w)."""

    def __init__(self, extra: Callable[[int], float], right: float, *, batch: int = 16, noise: float = 0.0) -> None:
        self.extra, self.right, self.batch, self.noise = extra, right, batch, noise
        self.step_s = 1.0
        self.gain = 0.0
        """Of the last launches, by the estimate."""
        self.choices: list[int] = []
        self._rng = random.Random(7)
        self._runs = np.zeros(RUNS, np.int64)
        self._run = [0] * batch

    def launches(
        self, count: int, lengths: DraftLength, widest: int = WIDTHS[-1], prefills: float = 0.0, cut: float = 0.0
    ) -> float:
        """Tokens per second of each response. `prefills`: share of the launches with a prefill, which are not measured.
        `cut`: share of the launches that get width 1, because pages are missing."""
        tokens = time_s = measured_s = undrafted_s = 0.0
        for _ in range(count):
            prefill = self._rng.random() < prefills
            width = lengths.choose(self.batch, widest, measured=not prefill)
            width = 1 if self._rng.random() < cut else width
            self.choices.append(width)
            if not prefill:
                lengths.launched(self.batch, width)
            got = 0.0
            for n in range(self.batch):
                right = 0
                while right < width and self._rng.random() < self.right:
                    right += 1
                got += min(right + 1, width) / self.batch
                self._run[n] = count_run(self._runs, self._run[n], min(right + 1, width), right == width)
            took_s = (self.step_s + self.extra(width)) * (1 + self.noise * self._rng.uniform(-1, 1))
            time_s += took_s
            lengths.observe_runs(self._runs)
            tokens += got
            if not prefill:
                measured_s += took_s
                undrafted_s += got * lengths.observe_step(self.batch, width, took_s)
        self.gain = undrafted_s / max(measured_s, 1e-9)
        return tokens / time_s


SLOPES = (0.0, 0.05, 0.3, 1.0)
RIGHT = (0.0, 0.1, 0.3, 0.6, 0.9)


def linear(slope: float) -> Callable[[int], float]:
    return lambda width: slope * (width - 1)


@pytest.mark.parametrize(
    ("slope", "right", "batch"),  # every pair of values
    quick_cases(
        product(SLOPES, RIGHT, [1, 8]),
        quick=[(s, r, (1, 8)[(m + n) % 2]) for m, s in enumerate(SLOPES) for n, r in enumerate(RIGHT)],
    ),
)
def test_never_loses_and_gains_almost_what_is_possible(slope: float, right: float, batch: int) -> None:
    count = 1200
    rates = [sum(right**n for n in range(w)) / (1 + slope * (w - 1)) for w in WIDTHS]
    s = Simulated(linear(slope), right, batch=batch, noise=0.1)
    lengths = DraftLength(WIDTHS)
    assert s.launches(count // 2, lengths) > 0.97 * rates[0]  # it learns, and tries
    rate = s.launches(count, lengths)
    assert rate > 0.98 * rates[0]
    # A gain of a few percent is not worth a trial.
    assert rate > min(0.93 * max(rates), max(rates) - 0.07 * rates[0])
    if right == 0:
        assert set(s.choices) == {1}


@pytest.mark.parametrize("right", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
def test_gain_is_estimated(slope: float, right: float) -> None:
    s, lengths = Simulated(linear(slope), right, noise=0.05), DraftLength(WIDTHS)
    s.launches(500, lengths)
    assert s.launches(500, lengths) == pytest.approx(s.gain, rel=0.04), "without drafts, one token takes a second"


def test_widths_that_lose_are_tried_rarely() -> None:
    s, lengths = Simulated(linear(2.0), 0.5), DraftLength(WIDTHS)
    s.launches(3 * RETRY, lengths)
    tried = Counter(s.choices)
    assert tried[2] == 3  # once after the start, and once after each pause
    assert set(tried) == {1, 2}  # at the cost of width 2, no other one would gain


def test_nothing_is_drafted_before_there_is_a_measurement() -> None:
    s, lengths = Simulated(linear(0.0), 0.9, batch=1), DraftLength(WIDTHS)
    s.launches(MIN_TOKENS // 2, lengths)
    assert set(s.choices) == {1}
    assert lengths.choose(256, 8) == 1, "no step of this batch was measured"


@pytest.mark.parametrize("widest", [1, 2, 5])
def test_width_is_at_most_widest(widest: int) -> None:
    s, lengths = Simulated(linear(0.0), 0.95), DraftLength(WIDTHS)
    s.launches(600, lengths, widest)
    assert max(s.choices) == max(w for w in WIDTHS if w <= widest)


def test_adapts_to_acceptance() -> None:
    s, lengths = Simulated(linear(0.1), 0.8), DraftLength(WIDTHS)
    s.launches(400, lengths)
    assert s.choices[-1] >= 4
    s.right = 0.0
    s.launches(400, lengths)
    assert s.choices[-1] == 1
    s.right = 0.8
    s.launches(400, lengths)
    assert s.choices[-1] >= 4


def test_adapts_to_cost() -> None:
    """Wider steps become expensive, for instance because another process uses the device, and cheap again."""
    s, lengths = Simulated(linear(0.02), 0.8), DraftLength(WIDTHS)
    s.launches(400, lengths)
    assert s.choices[-1] == 8
    s.extra = linear(3.0)
    s.launches(8 * PROBE, lengths)
    assert s.choices[-1] == 1
    s.extra = linear(0.02)
    s.launches(2 * RETRY, lengths)
    assert Counter(s.choices[-PROBE:])[8] >= PROBE - 2


def test_first_launch_that_took_long_is_not_the_last_word() -> None:
    """The first launch of a width may compile a kernel or capture a graph."""
    s, lengths = Simulated(linear(0.0), 0.8), DraftLength(WIDTHS)
    seen = set()

    def extra(width: int) -> float:
        first = width > 1 and width not in seen
        seen.add(width)
        return 100.0 if first else 0.0

    s.extra = extra
    s.launches(len(WIDTHS) * RETRY, lengths)
    assert s.choices[-1] == 8


def test_contexts_that_grow_are_not_mistaken_for_the_cost_of_a_width() -> None:
    s, lengths = Simulated(linear(0.1), 0.7), DraftLength(WIDTHS)
    s.launches(400, lengths)
    chosen = Counter(s.choices[-PROBE:]).most_common(1)[0][0]
    for _ in range(40):
        s.step_s *= 1.05
        s.launches(10, lengths)
    assert Counter(s.choices[-PROBE:]).most_common(1)[0][0] >= chosen > 1
    s.step_s = 1.0
    s.extra = linear(0.5)
    s.launches(8 * PROBE, lengths)
    assert s.choices[-2] <= 2


@pytest.mark.parametrize("prefills", [0.3, 0.6, 0.9, 0.98])
def test_launches_that_are_not_measured_cost_no_trial(prefills: float) -> None:
    """While prompts come all the time, most launches prefill: their time says nothing about a width. Drafts are used
    in them, too, as soon as other launches have shown what they cost."""
    s, lengths = Simulated(linear(0.05), 0.9), DraftLength(WIDTHS)
    s.launches(600, lengths, prefills=prefills)  # at 98 %, about 12 are measured
    tried = len(s.choices)
    s.launches(2000, lengths, prefills=prefills)
    assert sum(width > 1 for width in s.choices[tried:]) > 1800
    assert s.choices.count(8) > 1000


def test_no_width_is_tried_in_a_launch_that_is_not_measured() -> None:
    s, lengths = Simulated(linear(0.05), 0.9), DraftLength(WIDTHS)
    s.launches(20, lengths, widest=1)
    assert lengths.choose(s.batch, 8, measured=False) == 1
    assert lengths.choose(s.batch, 8) == 2


def test_width_that_pages_have_cut_is_tried_again() -> None:
    s, lengths = Simulated(linear(0.05), 0.9), DraftLength(WIDTHS)
    s.launches(200, lengths, cut=0.9)
    s.launches(200, lengths)
    assert s.choices[200:].count(8) > 180


def test_width_is_tried_after_a_launch_of_the_same_batch() -> None:
    """The cost of a width is the difference to the launch before. If that has another batch, there is none."""
    s, lengths = Simulated(linear(0.05), 0.9), DraftLength(WIDTHS)
    s.launches(20, lengths, widest=1)
    lengths.launched(64, 1)
    lengths.observe_step(64, 1, 4.0)
    assert lengths.choose(s.batch, 8) == 1
    s.launches(200, lengths)
    assert s.choices[-180:].count(8) > 160


def test_choosing_changes_nothing() -> None:
    s, lengths = Simulated(linear(0.05), 0.9), DraftLength(WIDTHS)
    s.launches(20, lengths, widest=1)
    assert {lengths.choose(s.batch, 8) for _ in range(3 * RETRY)} == {2}


def test_counts_of_runs_may_wrap_around() -> None:
    """The device counts in 32 bits, which are full after some days."""
    one, two = DraftLength(WIDTHS), DraftLength(WIDTHS)
    counted, wrapping = np.zeros(RUNS, np.int32), np.zeros(RUNS, np.int32)
    wrapping[0] = 2**31 - 900
    two.observe_runs(wrapping)
    for n in range(400):
        for counts in (counted, wrapping):
            counts[[0, 3]] += np.array([20, 5 if n else MEMORY], np.int32)  # enough to forget what was before
        one.observe_runs(counted)
        two.observe_runs(wrapping)
    assert wrapping[0] < 0
    assert [two.tokens_per_step(w) for w in WIDTHS] == pytest.approx([one.tokens_per_step(w) for w in WIDTHS])
