"""The step model: learned from one step, it predicts the end of steps with other fleets and other local times."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest

from windfall.controller.scheduling.local_time import PARTS, FleetSpeed, Progress, StepModel, StepRates
from windfall.step_time import StepTime

LOCAL = FleetSpeed.of(StepTime(fixed_s=100 / 40_000, each_s=1 / 40_000))
ONE = StepTime(fixed_s=100 / 10_000, each_s=1 / 10_000)
READS = StepTime(fixed_s=100 / 10_000, each_s=21e-5, context_s=2e-7, usual_context=1000)
"""Most of the time per token is spent reading the context."""


@dataclass
class Step:
    """Responses of uneven length; every engine step generates a token of each."""

    rates: StepRates
    lengths: list[int]
    size: int = 4
    join_s: float = 0.0
    """Seconds until the other workers join, later than in `rates`."""

    def progress(self, local_s: float) -> list[Progress]:
        """Simulated in intervals of 0.1 s."""
        at_s = done = 0.0
        groups = [sorted(self.lengths[i : i + self.size]) for i in range(0, len(self.lengths), self.size)]
        out: list[Progress] = []
        trainable = 0.0
        waiting = sorted(groups, key=lambda g: g[-1])
        while waiting:
            unfinished = sum(length > done for length in self.lengths)
            rate = self._speed(at_s, local_s).tok_per_s(unfinished, done * unfinished)
            if rate:
                done += rate * 0.1 / unfinished
            at_s += 0.1
            while waiting and waiting[0][-1] <= done:
                trainable += sum(waiting.pop(0))
                generated = sum(min(length, done) for length in self.lengths)
                unfinished = sum(length > done for length in self.lengths)
                out.append(Progress(at_s, generated, trainable, unfinished, done * unfinished))
        return out

    def _speed(self, at_s: float, local_s: float) -> FleetSpeed:
        r = self.rates
        if at_s < max(r.pull_s, self.join_s):
            return r.local if at_s < local_s else FleetSpeed()
        return r.others if at_s >= local_s else r.local + r.others

    def speeds(self, local_s: float) -> list[tuple[float, FleetSpeed]]:
        changes = sorted({0.0, self.rates.pull_s, self.join_s, local_s})
        return [(at_s, self._speed(at_s, local_s)) for at_s in changes]

    def end_s(self, local_s: float) -> float:
        free_s, before = local_s, 0.0
        for point in self.progress(local_s):
            free_s = max(free_s, point.at_s) + (point.trainable - before) / self.rates.train_tok_per_s
            before = point.trainable
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
        train_tok_per_s=30_000.0,
        pull_s=0.5,
    )
    return Step(rates, lengths)


@pytest.mark.parametrize("workers", [2, 3, 6])
@pytest.mark.parametrize("share", [0.3, 0.6, 1.0])
def test_one_step_predicts_the_end_of_steps_with_other_fleets(step: Step, workers: int, share: float) -> None:
    """Learned with three workers and one local time; predicted for more or fewer workers and another local time."""
    model = StepModel()
    model.learn(step.progress(3.0), step.speeds(3.0), 256, 1.0)
    other = Step(replace(step.rates, others=FleetSpeed.of(ONE, count=workers)), step.lengths)
    local_s = share * model.generated_s(other.rates)
    assert model.end_s(other.rates, local_s) == pytest.approx(other.end_s(local_s), rel=0.06)


@pytest.mark.parametrize("workers", [1, 3, 6])
def test_best_local_time_is_as_good_as_brute_force(step: Step, workers: int) -> None:
    model = StepModel()
    model.learn(step.progress(3.0), step.speeds(3.0), 256, 1.0)
    other = Step(replace(step.rates, others=FleetSpeed.of(ONE, count=workers)), step.lengths)
    chosen = other.end_s(model.best_local_s(other.rates))
    assert chosen <= 1.04 * min(other.end_s(0.5 * n) for n in range(24))


@pytest.mark.parametrize("profile", [ONE, READS], ids=["plain", "context"])
def test_step_with_a_late_fleet_predicts_a_step_with_the_fleet_from_the_start(step: Step, profile: StepTime) -> None:
    """The model uses the workers at each moment, not their mean over the step, which is lower than their final
    number."""
    rates = replace(
        step.rates,
        others=FleetSpeed.of(profile, count=12),
        local=FleetSpeed.of(profile, count=4),
        train_tok_per_s=20_000.0,
    )
    late, full = Step(rates, step.lengths, join_s=6.0), Step(rates, step.lengths)
    model = StepModel()
    model.learn(late.progress(math.inf), late.speeds(math.inf), 256, 1.0)
    for local_s in (0.0, 2.0, 4.0):
        assert model.end_s(rates, local_s) == pytest.approx(full.end_s(local_s), rel=0.06)
    assert full.end_s(model.best_local_s(rates)) <= 1.03 * min(full.end_s(0.5 * n) for n in range(24))


@pytest.mark.parametrize("at", [2, 8, 24])
def test_prediction_from_within_a_step_agrees_with_the_one_from_its_start(step: Step, at: int) -> None:
    model, progress = StepModel(), step.progress(20.0)
    model.learn(progress, step.speeds(20.0), 256, 1.0)
    now = progress[at]
    assert now.at_s < 20.0
    assert model.end_s(step.rates, 20.0, now) == pytest.approx(model.end_s(step.rates, 20.0), rel=0.02)
    assert model.best_local_s(step.rates, now) >= now.at_s
    rates, none_complete = replace(step.rates, train_tok_per_s=4_000.0), now._replace(trainable=0.0)
    assert model.end_s(rates, now.at_s, none_complete) > model.end_s(rates, now.at_s, now), "no group is complete yet"


def test_closed_form_from_rates_ends_local_time_too_early(step: Step) -> None:
    """The closed form assumes that work can be split freely; with it, training waits for groups."""
    r = step.rates
    low, others = r.local.tok_per_s(256), r.others.tok_per_s(256)
    plain = max(0.0, (r.tokens * (1 - others / r.train_tok_per_s) + others * r.pull_s) / (low + others))
    model = StepModel()
    model.learn(step.progress(plain), step.speeds(plain), 256, 1.0)
    assert step.end_s(model.best_local_s(r)) < 0.97 * step.end_s(plain)


def test_points_are_evenly_spread_over_generated_and_trainable(step: Step) -> None:
    model = StepModel()
    model.learn(step.progress(3.0), step.speeds(3.0), 256, 1.0)
    assert model.generated == sorted(model.generated)
    assert (model.generated[-1], model.trainable[-1]) == (pytest.approx(1.0), pytest.approx(1.0))
    along = [a + b for a, b in zip(model.generated, model.trainable, strict=True)]
    assert along == pytest.approx([2 * (n + 1) / PARTS for n in range(PARTS)])


def test_empty_step_is_not_learned_from(step: Step) -> None:
    model = StepModel()
    model.learn([], step.speeds(1.0), 256, 1.0)
    assert model.steps == 0


def test_discarded_tokens_still_give_a_finite_plan() -> None:
    """More tokens than in the complete groups: some responses started again, and at the end none was unfinished."""
    rates = StepRates(
        tokens=1000, responses=10, local=FleetSpeed.constant(50), others=FleetSpeed.constant(100), train_tok_per_s=200.0
    )
    model = StepModel()
    model.learn([Progress(5.0, 600, 200, 5), Progress(9.0, 1300, 1000, 0)], [(0.0, FleetSpeed.constant(150))], 10, 1.0)
    assert math.isfinite(model.generated_s(rates))
    assert 0 <= model.best_local_s(rates) <= model.generated_s(rates)
