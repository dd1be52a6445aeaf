"""The course of a step: learned, it says when steps end that were never run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from windfall.rollout.course import PARTS, Course, Crowd, Mark, Rates

LOCAL = Crowd(slope=40_000.0, bend=100.0)
ONE = Crowd(slope=10_000.0, bend=100.0)


@dataclass
class Step:
    """Responses of uneven length that all get a token in every step of whoever makes them."""

    rates: Rates
    lengths: list[int]
    size: int = 4

    def marks(self, seed_s: float) -> list[Mark]:
        """In thin slices of time."""
        at_s, done = 0.0, 0.0
        groups = [sorted(self.lengths[i : i + self.size]) for i in range(0, len(self.lengths), self.size)]
        out: list[Mark] = []
        whole = 0.0
        waiting = sorted(groups, key=lambda g: g[-1])
        while waiting:
            open = sum(length > done for length in self.lengths)
            rate = self.rates.crowd(at_s, seed_s).tok_per_s(open)
            if rate:
                done += rate * 0.1 / open
            at_s += 0.1
            while waiting and waiting[0][-1] <= done:
                whole += sum(waiting.pop(0))
                made = sum(min(length, done) for length in self.lengths)
                out.append(Mark(at_s, made, whole, sum(length > done for length in self.lengths)))
        return out

    def end_s(self, seed_s: float) -> float:
        free_s, before = seed_s, 0.0
        for mark in self.marks(seed_s):
            free_s = max(free_s, mark.at_s) + (mark.whole - before) / self.rates.train
            before = mark.whole
        return free_s


@pytest.fixture
def step() -> Step:
    draw = random.Random(3)
    lengths = [min(14_000, round(draw.lognormvariate(math.log(1000), 0.8))) for _ in range(256)]
    rates = Rates(
        tokens=sum(lengths), responses=len(lengths), local=LOCAL, others=ONE + ONE + ONE, train=30_000.0, pull_s=0.5
    )
    return Step(rates, lengths)


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_step_tells_how_others_end(step: Step, workers: int, share: float) -> None:
    """Learned with three workers and one T_seed; asked with more or fewer, and another."""
    course = Course()
    course.learn(step.marks(3.0), step.rates, 3.0, 1.0)
    other = Step(replace(step.rates, others=ONE.times(workers)), step.lengths)
    seed_s = share * course.made_s(other.rates, math.inf)
    assert course.end_s(other.rates, seed_s) == pytest.approx(other.end_s(seed_s), rel=0.06)


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_the_best_is_as_good_as_brute_force(step: Step, workers: int) -> None:
    course = Course()
    course.learn(step.marks(3.0), step.rates, 3.0, 1.0)
    other = Step(replace(step.rates, others=ONE.times(workers)), step.lengths)
    chosen = other.end_s(course.best(other.rates))
    assert chosen <= 1.04 * min(other.end_s(0.5 * n) for n in range(24))


def test_rates_alone_would_stop_seeding_too_early(step: Step) -> None:
    """The closed form for work that splits at will: training then waits for groups."""
    r = step.rates
    low, others = r.local.tok_per_s(256), r.others.tok_per_s(256)
    plain = max(0.0, (r.tokens * (1 - others / r.train) + others * r.pull_s) / (low + others))
    course = Course()
    course.learn(step.marks(plain), r, plain, 1.0)
    assert step.end_s(course.best(r)) < 0.97 * step.end_s(plain)


def test_points_are_where_groups_become_whole(step: Step) -> None:
    course = Course()
    course.learn(step.marks(3.0), step.rates, 3.0, 1.0)
    assert course.made == sorted(course.made)
    assert (course.made[-1], course.whole[-1]) == (pytest.approx(1.0), pytest.approx(1.0))
    along = [a + b for a, b in zip(course.made, course.whole, strict=True)]
    assert along == pytest.approx([2 * (n + 1) / PARTS for n in range(PARTS)])


def test_a_step_of_nothing_teaches_nothing(step: Step) -> None:
    course = Course()
    course.learn([], step.rates, 1.0, 1.0)
    assert course.steps == 0


def test_what_was_made_and_thrown_away_leaves_a_plan_that_is_a_number() -> None:
    """More tokens than the whole groups have: some responses began again, and at the end none was open."""
    rates = Rates(tokens=1000, responses=10, local=Crowd(slope=50), others=Crowd(slope=100), train=200.0)
    course = Course()
    course.learn([Mark(5.0, 600, 200, 5), Mark(9.0, 1300, 1000, 0)], rates, 3.0, 1.0)
    assert math.isfinite(course.made_s(rates, math.inf))
    assert 0 <= course.best(rates) <= course.made_s(rates, math.inf)
