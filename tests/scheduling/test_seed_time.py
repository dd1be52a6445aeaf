"""T_seed: RLBoost's rule as published, and the computed one beside brute force on a plain model of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windfall.scheduling.seed_time import Measured, Offload, Others, Predict, RLBoostSeeding


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A step in the plain model of offload.py: rates that do not change, work that splits as finely as one likes."""

    tokens: float
    local: float
    train: float
    pull_s: float = 0.0

    def run(self, seed_s: float, rate: float, workers: int) -> tuple[float, Measured]:
        """How long the step takes, and what is measured of it."""
        w, low, a, p = self.tokens, self.local, self.train, self.pull_s
        both = low + rate
        alone_s = min(p, w / low)
        made_s = alone_s + (w - low * alone_s) / both  # with all generating to the end
        if seed_s >= made_s or rate == 0:
            end = made_s if rate else w / low
            return end + w / a, Measured(
                tokens=round(w), seed_s=end, local_tokens=round(low * end), train_s=w / a, train_wait_s=0.0,
                remote_wait_s=w / a if rate else 0.0, remote_s=end, workers=workers,
            )  # fmt: skip
        left = w - low * seed_s - rate * max(0.0, seed_s - p)
        generated = max(seed_s, p) + left / rate
        stuck = p + (w - low * seed_s) / a if seed_s < p else 0.0  # what is not made cannot be trained on
        end = max(seed_s + w / a, generated, stuck)
        return end, Measured(
            tokens=round(w), seed_s=seed_s, local_tokens=round(low * seed_s), train_s=w / a,
            train_wait_s=end - seed_s - w / a, remote_wait_s=end - generated, remote_s=generated, workers=workers,
        )  # fmt: skip


def settle(policy: Offload, machine: Machine, rate: float, workers: int, steps: int) -> list[float]:
    """Step times, one after the other."""
    last, out = None, []
    for _ in range(steps):
        plan = policy.plan(last, Others(workers=workers, tok_per_s=rate, pull_s=machine.pull_s))
        took, last = machine.run(plan.seed_s, rate, workers)
        out.append(took)
    return out


rates = st.floats(50, 5000)


@settings(deadline=None, max_examples=50)
@given(tokens=st.floats(1e3, 1e5), local=rates, train=rates, rate=rates, pull=st.floats(0, 0.2))
@example(tokens=1000.0, local=332.5106, train=50.7235, rate=1007.0439, pull=0.1952)  # a plan that was 2.55 % off
def test_computed_seed_is_the_best_there_is(
    tokens: float, local: float, train: float, rate: float, pull: float
) -> None:
    machine = Machine(tokens=tokens, local=local, train=train, pull_s=pull * tokens / local)
    reached = settle(Predict(), machine, rate, 2, steps=12)[-1]
    best = min(machine.run(tokens / local * k / 400, rate, 2)[0] for k in range(401))
    best = min(best, machine.run(math.inf, rate, 2)[0])
    assert reached <= best * 1.02


def test_a_change_of_the_fleet_is_answered_at_once() -> None:
    machine, policy = Machine(tokens=10_000, local=1000, train=1500), Predict()
    settle(policy, machine, 500, 2, steps=6)
    _, last = machine.run(policy.plan(None, Others(workers=2, tok_per_s=500)).seed_s, 500, 2)
    first = policy.plan(last, Others(workers=4, tok_per_s=1000))
    best = min(machine.run(10 * k / 400, 1000, 4)[0] for k in range(401))
    assert machine.run(first.seed_s, 1000, 4)[0] <= best * 1.02


@pytest.mark.parametrize("policy", [RLBoostSeeding(first_s=3.0), Predict()], ids=["feedback", "predict"])
def test_nobody_else_means_no_end(policy: Offload) -> None:
    assert policy.plan(None, Others(workers=0, tok_per_s=0)).seed_s == math.inf
    last = Measured(
        tokens=100, seed_s=2, local_tokens=50, train_s=1, train_wait_s=0, remote_wait_s=0, remote_s=3, workers=2
    )
    assert policy.plan(last, Others(workers=0, tok_per_s=0)).seed_s == math.inf


def test_what_nobody_has_measured_is_measured_first() -> None:
    policy = Predict()
    assert policy.plan(None, Others(workers=3, tok_per_s=0)).seed_s == math.inf
    assert "unknown" in policy.plan(None, Others(workers=3, tok_per_s=900)).why


def test_training_that_is_fast_enough_for_nobody_needs_no_seed() -> None:
    """The fleet alone makes more than is trained: local never generates."""
    machine, policy = Machine(tokens=10_000, local=1000, train=400), Predict()
    settle(policy, machine, 2000, 4, steps=5)
    assert policy.plan(None, Others(workers=4, tok_per_s=2000)).seed_s < 0.1


@settings(deadline=None)
@given(waits=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=8))
def test_algorithm_1_to_the_letter(waits: list[tuple[float, float]]) -> None:
    policy, seed = RLBoostSeeding(first_s=20.0), 20.0
    for train_wait, remote_wait in waits:
        last = Measured(
            tokens=1, seed_s=seed, local_tokens=1, train_s=10.0, train_wait_s=train_wait, remote_wait_s=remote_wait,
            remote_s=30.0, workers=2,
        )  # fmt: skip
        plan = policy.plan(last, Others(workers=2, tok_per_s=1))
        seed = max(0.0, seed + (train_wait - remote_wait) / 3)
        assert plan.seed_s == pytest.approx(seed)
        assert plan.most_workers == pytest.approx((30.0 * 2 + seed) / 10.0)


def test_memory_goes_back_to_what_worked_for_a_size() -> None:
    policy = RLBoostSeeding(first_s=10.0)

    def after(workers: float, now: int, wait: float) -> float:
        last = Measured(
            tokens=1, seed_s=1.0, local_tokens=1, train_s=1.0, train_wait_s=wait, remote_wait_s=0.0, remote_s=1.0,
            workers=workers,
        )  # fmt: skip
        return policy.plan(last, Others(workers=now, tok_per_s=1)).seed_s

    assert after(2, 2, 6.0) == 12.0
    assert after(2, 3, 6.0) == 14.0  # the fleet changed: not remembered
    assert after(3, 3, -30.0) == 4.0
    assert after(3, 2, 0.0) == 12.0  # two again: what worked for two
    assert after(2.5, 3, 0.0) == 4.0


def test_predict_beats_feedback_when_the_fleet_changes_often() -> None:
    machine = Machine(tokens=10_000, local=1000, train=1250, pull_s=0.3)
    sizes = [2, 2, 5, 5, 1, 1, 1, 4, 4, 0, 0, 3, 3, 6, 6, 2] * 4

    def total(policy: Offload) -> float:
        last, out = None, 0.0
        for n in sizes:
            plan = policy.plan(last, Others(workers=n, tok_per_s=250.0 * n, pull_s=0.3))
            took, last = machine.run(plan.seed_s, 250.0 * n, n)
            out += took
        return out

    assert total(Predict()) < 0.97 * total(RLBoostSeeding(first_s=4.0))
