"""The course of a step: learned, it says when steps end that were never run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from windfall.scheduling.fleet_speed import FleetSpeed, StepRates
from windfall.scheduling.step_model import PARTS, Mark, StepModel
from windfall.scheduling.worker_speed import Profile

LOCAL = FleetSpeed.of(Profile(fixed_s=100 / 40_000, each_s=1 / 40_000))
ONE = Profile(fixed_s=100 / 10_000, each_s=1 / 10_000)
READS = Profile(fixed_s=100 / 10_000, each_s=21e-5, context_s=2e-7, context=1000)
"""Of a token that it makes, most of the time is for reading what is behind it."""


@dataclass
class Step:
    """Responses of uneven length that all get a token in every step of whoever makes them."""

    rates: StepRates
    lengths: list[int]
    size: int = 4
    come_s: float = 0.0
    """When the others come: later than `rates` says."""

    def marks(self, seed_s: float) -> list[Mark]:
        """In thin slices of time."""
        at_s = done = 0.0
        groups = [sorted(self.lengths[i : i + self.size]) for i in range(0, len(self.lengths), self.size)]
        out: list[Mark] = []
        whole = 0.0
        waiting = sorted(groups, key=lambda g: g[-1])
        while waiting:
            open = sum(length > done for length in self.lengths)
            behind = done * open
            rate = self._crowd(at_s, seed_s).tok_per_s(open, behind)
            if rate:
                done += rate * 0.1 / open
            at_s += 0.1
            while waiting and waiting[0][-1] <= done:
                whole += sum(waiting.pop(0))
                made = sum(min(length, done) for length in self.lengths)
                open = sum(length > done for length in self.lengths)
                out.append(Mark(at_s, made, whole, open, done * open))
        return out

    def _crowd(self, at_s: float, seed_s: float) -> FleetSpeed:
        r = self.rates
        if at_s < max(r.pull_s, self.come_s):
            return r.local if at_s < seed_s else FleetSpeed()
        return r.others if at_s >= seed_s else r.local + r.others

    def there(self, seed_s: float) -> list[tuple[float, FleetSpeed]]:
        changes = sorted({0.0, self.rates.pull_s, self.come_s, seed_s})
        return [(at_s, self._crowd(at_s, seed_s)) for at_s in changes]

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
    rates = StepRates(
        tokens=sum(lengths),
        responses=len(lengths),
        local=LOCAL,
        others=FleetSpeed.of(ONE, count=3),
        train=30_000.0,
        pull_s=0.5,
    )
    return Step(rates, lengths)


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_a_step_tells_how_others_end(step: Step, workers: int, share: float) -> None:
    """Learned with three workers and one T_seed; asked with more or fewer, and another."""
    course = StepModel()
    course.learn(step.marks(3.0), step.there(3.0), 256, 1.0)
    other = Step(replace(step.rates, others=FleetSpeed.of(ONE, count=workers)), step.lengths)
    seed_s = share * course.made_s(other.rates)
    assert course.end_s(other.rates, seed_s) == pytest.approx(other.end_s(seed_s), rel=0.06)


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_the_best_is_as_good_as_brute_force(step: Step, workers: int) -> None:
    course = StepModel()
    course.learn(step.marks(3.0), step.there(3.0), 256, 1.0)
    other = Step(replace(step.rates, others=FleetSpeed.of(ONE, count=workers)), step.lengths)
    chosen = other.end_s(course.best(other.rates))
    assert chosen <= 1.04 * min(other.end_s(0.5 * n) for n in range(24))


@pytest.mark.parametrize("profile", [ONE, READS], ids=["plain", "reads its cache"])
def test_a_step_in_which_the_fleet_came_late_tells_of_one_that_it_begins_with(step: Step, profile: Profile) -> None:
    """What counts is who was there at each moment: on average over the step, there were fewer than at its end."""
    rates = replace(
        step.rates, others=FleetSpeed.of(profile, count=12), local=FleetSpeed.of(profile, count=4), train=20_000.0
    )
    late, whole = Step(rates, step.lengths, come_s=6.0), Step(rates, step.lengths)
    course = StepModel()
    course.learn(late.marks(math.inf), late.there(math.inf), 256, 1.0)
    for seed_s in (0.0, 2.0, 4.0):
        assert course.end_s(rates, seed_s) == pytest.approx(whole.end_s(seed_s), rel=0.06)
    assert whole.end_s(course.best(rates)) <= 1.03 * min(whole.end_s(0.5 * n) for n in range(24))


@pytest.mark.parametrize("at", [2, 8, 24])
def test_from_where_a_step_stands_its_end_is_the_same(step: Step, at: int) -> None:
    course, marks = StepModel(), step.marks(20.0)
    course.learn(marks, step.there(20.0), 256, 1.0)
    now = marks[at]
    assert now.at_s < 20.0
    assert course.end_s(step.rates, 20.0, now) == pytest.approx(course.end_s(step.rates, 20.0), rel=0.02)
    assert course.best(step.rates, now) >= now.at_s
    rates, behind = replace(step.rates, train=4_000.0), now._replace(whole=0.0)
    assert course.end_s(rates, now.at_s, behind) > course.end_s(rates, now.at_s, now), "nothing is whole yet"


def test_rates_alone_would_stop_seeding_too_early(step: Step) -> None:
    """The closed form for work that splits at will: training then waits for groups."""
    r = step.rates
    low, others = r.local.tok_per_s(256), r.others.tok_per_s(256)
    plain = max(0.0, (r.tokens * (1 - others / r.train) + others * r.pull_s) / (low + others))
    course = StepModel()
    course.learn(step.marks(plain), step.there(plain), 256, 1.0)
    assert step.end_s(course.best(r)) < 0.97 * step.end_s(plain)


def test_points_are_where_groups_become_whole(step: Step) -> None:
    course = StepModel()
    course.learn(step.marks(3.0), step.there(3.0), 256, 1.0)
    assert course.made == sorted(course.made)
    assert (course.made[-1], course.whole[-1]) == (pytest.approx(1.0), pytest.approx(1.0))
    along = [a + b for a, b in zip(course.made, course.whole, strict=True)]
    assert along == pytest.approx([2 * (n + 1) / PARTS for n in range(PARTS)])


def test_a_step_of_nothing_teaches_nothing(step: Step) -> None:
    course = StepModel()
    course.learn([], step.there(1.0), 256, 1.0)
    assert course.steps == 0


def test_what_was_made_and_thrown_away_leaves_a_plan_that_is_a_number() -> None:
    """More tokens than the whole groups have: some responses began again, and at the end none was open."""
    rates = StepRates(
        tokens=1000, responses=10, local=FleetSpeed.steady(50), others=FleetSpeed.steady(100), train=200.0
    )
    course = StepModel()
    course.learn([Mark(5.0, 600, 200, 5), Mark(9.0, 1300, 1000, 0)], [(0.0, FleetSpeed.steady(150))], 10, 1.0)
    assert math.isfinite(course.made_s(rates))
    assert 0 <= course.best(rates) <= course.made_s(rates)
