"""The local time: RLBoost's Algorithm 1 as published, and the predicted one against brute force on a simple model of a
step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.papers.rlboost import Algorithm1
from windfall.controller.scheduling.local_time import LocalTimePolicy, PredictedLocalTime, RemoteFleet, StepMeasurement


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A step in the simple model of local_time.py: constant rates, and work that can be split freely."""

    tokens: float
    local: float
    train: float
    pull_s: float = 0.0

    def run(self, local_s: float, rate: float, workers: int) -> tuple[float, StepMeasurement]:
        """The time of the step, and its measurements."""
        w, low, a, p = self.tokens, self.local, self.train, self.pull_s
        both = low + rate
        alone_s = min(p, w / low)
        generated_s = alone_s + (w - low * alone_s) / both  # if all engines generate until the end
        if local_s >= generated_s or rate == 0:
            end = generated_s if rate else w / low
            return end + w / a, StepMeasurement(
                tokens=round(w), local_s=end, local_tokens=round(low * end), train_s=w / a, train_wait_s=0.0,
                remote_wait_s=w / a if rate else 0.0, remote_s=end, workers=workers,
            )  # fmt: skip
        left = w - low * local_s - rate * max(0.0, local_s - p)
        generated = max(local_s, p) + left / rate
        stuck = (
            p + (w - low * local_s) / a if local_s < p else 0.0
        )  # tokens must be generated before they are trained on
        end = max(local_s + w / a, generated, stuck)
        return end, StepMeasurement(
            tokens=round(w), local_s=local_s, local_tokens=round(low * local_s), train_s=w / a,
            train_wait_s=end - local_s - w / a, remote_wait_s=end - generated, remote_s=generated, workers=workers,
        )  # fmt: skip


def settle(policy: LocalTimePolicy, machine: Machine, rate: float, workers: int, steps: int) -> list[float]:
    """The times of consecutive steps."""
    last, out = None, []
    for _ in range(steps):
        plan = policy.plan(last, RemoteFleet(workers=workers, tok_per_s=rate, pull_s=machine.pull_s))
        took, last = machine.run(plan.local_s, rate, workers)
        out.append(took)
    return out


rates = st.floats(50, 5000)


@settings(deadline=None, max_examples=50)
@given(tokens=st.floats(1e3, 1e5), local=rates, train=rates, rate=rates, pull=st.floats(0, 0.2))
@example(tokens=1000.0, local=332.5106, train=50.7235, rate=1007.0439, pull=0.1952)  # it was once 2.55 % off
def test_predicted_local_time_is_optimal(tokens: float, local: float, train: float, rate: float, pull: float) -> None:
    machine = Machine(tokens=tokens, local=local, train=train, pull_s=pull * tokens / local)
    reached = settle(PredictedLocalTime(), machine, rate, 2, steps=12)[-1]
    best = min(machine.run(tokens / local * k / 400, rate, 2)[0] for k in range(401))
    best = min(best, machine.run(math.inf, rate, 2)[0])
    assert reached <= best * 1.02


def test_fleet_change_is_planned_for_in_the_same_step() -> None:
    machine, policy = Machine(tokens=10_000, local=1000, train=1500), PredictedLocalTime()
    settle(policy, machine, 500, 2, steps=6)
    _, last = machine.run(policy.plan(None, RemoteFleet(workers=2, tok_per_s=500)).local_s, 500, 2)
    first = policy.plan(last, RemoteFleet(workers=4, tok_per_s=1000))
    best = min(machine.run(10 * k / 400, 1000, 4)[0] for k in range(401))
    assert machine.run(first.local_s, 1000, 4)[0] <= best * 1.02


@pytest.mark.parametrize("policy", [Algorithm1(first_s=3.0), PredictedLocalTime()], ids=["feedback", "predict"])
def test_without_other_workers_local_time_is_unbounded(policy: LocalTimePolicy) -> None:
    assert policy.plan(None, RemoteFleet(workers=0, tok_per_s=0)).local_s == math.inf
    last = StepMeasurement(
        tokens=100, local_s=2, local_tokens=50, train_s=1, train_wait_s=0, remote_wait_s=0, remote_s=3, workers=2
    )
    assert policy.plan(last, RemoteFleet(workers=0, tok_per_s=0)).local_s == math.inf


def test_unknown_rates_are_measured_first() -> None:
    policy = PredictedLocalTime()
    assert policy.plan(None, RemoteFleet(workers=3, tok_per_s=0)).local_s == math.inf
    assert "measuring" in policy.plan(None, RemoteFleet(workers=3, tok_per_s=900)).why


def test_fleet_faster_than_training_needs_no_local_time() -> None:
    """The fleet alone generates faster than the trainer trains, so local never generates."""
    machine, policy = Machine(tokens=10_000, local=1000, train=400), PredictedLocalTime()
    settle(policy, machine, 2000, 4, steps=5)
    assert policy.plan(None, RemoteFleet(workers=4, tok_per_s=2000)).local_s < 0.1


@settings(deadline=None)
@given(waits=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=8))
def test_algorithm_1_as_published(waits: list[tuple[float, float]]) -> None:
    policy, seed = Algorithm1(first_s=20.0), 20.0
    for train_wait, remote_wait in waits:
        last = StepMeasurement(
            tokens=1, local_s=seed, local_tokens=1, train_s=10.0, train_wait_s=train_wait, remote_wait_s=remote_wait,
            remote_s=30.0, workers=2,
        )  # fmt: skip
        plan = policy.plan(last, RemoteFleet(workers=2, tok_per_s=1))
        seed = max(0.0, seed + (train_wait - remote_wait) / 3)
        assert plan.local_s == pytest.approx(seed)


def test_algorithm_1_remembers_local_time_by_fleet_size() -> None:
    policy = Algorithm1(first_s=10.0)

    def after(workers: float, now: int, wait: float) -> float:
        last = StepMeasurement(
            tokens=1, local_s=1.0, local_tokens=1, train_s=1.0, train_wait_s=wait, remote_wait_s=0.0, remote_s=1.0,
            workers=workers,
        )  # fmt: skip
        return policy.plan(last, RemoteFleet(workers=now, tok_per_s=1)).local_s

    assert after(2, 2, 6.0) == 12.0
    assert after(2, 3, 6.0) == 14.0  # the fleet changed: not stored
    assert after(3, 3, -30.0) == 4.0
    assert after(3, 2, 0.0) == 12.0  # two workers again: the stored value
    assert after(2.5, 3, 0.0) == 4.0


def test_prediction_beats_algorithm_1_when_the_fleet_changes_often() -> None:
    machine = Machine(tokens=10_000, local=1000, train=1250, pull_s=0.3)
    sizes = [2, 2, 5, 5, 1, 1, 1, 4, 4, 0, 0, 3, 3, 6, 6, 2] * 4

    def total(policy: LocalTimePolicy) -> float:
        last, out = None, 0.0
        for n in sizes:
            plan = policy.plan(last, RemoteFleet(workers=n, tok_per_s=250.0 * n, pull_s=0.3))
            took, last = machine.run(plan.local_s, 250.0 * n, n)
            out += took
        return out

    assert total(PredictedLocalTime()) < 0.97 * total(Algorithm1(first_s=4.0))
