"""How many workers pay: the model against brute force, against RLBoost's published figures, and the texts of the
advice.

Rates that change with the number of workers (smaller batches) are tested in tests/controller/rollout/test_advisor.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.controller.workers.worker_value import (
    MIN_GAIN,
    NOT_YET,
    RunMeasurements,
    WorkerKind,
    advise,
    step_s,
    value_curve,
)

# RLBoost, 8B on 8 H100. Fitted: train = local = 20K tok/s, so that co-located training has its 10K tok/s; 4K tok/s per
# instance, from the slope of 2K. Growth then ends (R = A) at 5 instances, which is not published. The paper's own
# prices.
RESERVED_USD_PER_H, INSTANCE_USD_PER_H = 83.79, 5.32
RUN = RunMeasurements(
    steps=5, tokens_per_step=4e6, train_tok_per_s=20e3, local_tok_per_s=20e3, trainer_usd_per_h=RESERVED_USD_PER_H
)
SPOT = WorkerKind(name="spot", now=0, tok_per_s=4e3, usd_per_h=INSTANCE_USD_PER_H)
# 14B. Fitted: one instance generates 0.37 as fast as the trainer's engine (+37 %), and training limits growth to 2.25x.
RUN_14B = replace(RUN, local_tok_per_s=16e3)
SPOT_14B = replace(SPOT, tok_per_s=0.37 * 16e3)

rates = st.floats(10, 1e5)


def brute(run: RunMeasurements, fleet: float) -> float:
    """The minimum over many T, from the definition alone."""
    w, local = run.tokens_per_step, run.local_tok_per_s
    longest = w / (local + fleet) if local > 0 else 0.0
    best = float("inf")
    for n in range(2001):
        local_s = longest * n / 2000
        left = w - (local + fleet) * local_s
        if left > 1e-6 * w and fleet == 0:
            continue
        generated_s = local_s + (left / fleet if fleet else 0.0)
        best = min(best, max(local_s + w / run.train_tok_per_s, generated_s))
    return best


@given(rates, st.just(0.0) | rates, rates, st.just(0.0) | rates)
@settings(max_examples=60, deadline=None)
def test_no_other_local_time_gives_a_shorter_step(w: float, local: float, train: float, fleet: float) -> None:
    run = RunMeasurements(
        steps=2, tokens_per_step=w, train_tok_per_s=train, local_tok_per_s=local, trainer_usd_per_h=1.0
    )
    if local + fleet == 0:
        assert step_s(run, 0.0) == float("inf")
    else:
        assert step_s(run, fleet) == pytest.approx(brute(run, fleet), rel=2e-3)
        assert step_s(run, fleet) <= brute(run, fleet) * (1 + 1e-9)


def test_rlboost_8b_figures_are_reproduced() -> None:
    speed = {p.workers: p.tok_per_s for p in value_curve(RUN, SPOT)}
    assert [speed[n] for n in range(5)] == pytest.approx([10e3, 12e3, 14e3, 16e3, 18e3])
    per_usd = {p.workers: p.tokens_per_usd for p in value_curve(RUN, SPOT)}
    # Published over its traces: 1.66x and +34 %. The model gives 1.66x for 3.3 instances; 3 and 4 bracket the
    # measurement.
    assert 1.30 < per_usd[3] / per_usd[0] < 1.37
    assert 1.40 < per_usd[4] / per_usd[0] < 1.45
    assert advise(RUN, SPOT).count == 5, "R = A at five; a sixth would wait"


def test_rlboost_14b_figures_are_reproduced() -> None:
    per_usd = [p.tokens_per_usd for p in value_curve(RUN_14B, replace(SPOT_14B, now=6))]
    speed = [p.tok_per_s for p in value_curve(RUN_14B, replace(SPOT_14B, now=6))]
    assert (speed[1] / speed[0], speed[6] / speed[0]) == pytest.approx((1.37, 2.25), rel=1e-3)  # fitted
    assert per_usd[0] / per_usd[1] == pytest.approx(1 - 0.22, abs=0.01)  # published: -22 % cost per token
    assert per_usd[6] / per_usd[0] == pytest.approx(1.62, abs=0.02)  # published: 1.62x


@pytest.mark.parametrize(("losses_per_h", "least"), [(0.0, 0.25), (1.0, 0.31)])
def test_small_spot_discount_does_not_pay(losses_per_h: float, least: float) -> None:
    """Published: below about 30 % it does not pay. An instance is a quarter of the reserved machine."""

    def pays(discount: float) -> bool:
        price = RESERVED_USD_PER_H / 4 * (1 - discount)
        kind = replace(SPOT, usd_per_h=price, boot_s=300, losses_per_h=losses_per_h)
        return advise(RUN, kind).count > 0

    found = [pays(percent / 100) for percent in range(101)]
    assert found == sorted(found)
    assert found.index(True) / 100 == pytest.approx(least, abs=0.011)


def test_reasons_of_the_advice() -> None:
    def why(now: int, **changes: float) -> str:
        return advise(RUN, replace(SPOT, now=now, **changes)).why  # pyright: ignore

    assert why(2) == "generation is the bottleneck: 3 more would pay off"
    assert why(4) == "generation is the bottleneck: 1 more would pay off"
    assert why(5) == "training is the bottleneck: one more would only wait"
    assert why(8) == "training is the bottleneck: 3 of 8 only wait"
    assert why(4, usd_per_h=20.0) == "4 of 4 add less than they cost"
    assert why(2, max_count=2) == "no change: no other number gains 3%"
    assert why(1, usd_per_h=16.5) == "no change: no other number gains 3%"
    slow = replace(RUN, train_tok_per_s=200.0)
    assert advise(slow, SPOT).why == "no change: no other number gains 3%"
    assert advise(slow, replace(SPOT, now=9)).count == 0


def test_no_advice_too_early_or_without_prices() -> None:
    some = replace(SPOT, now=2)
    for run, kind in [
        (replace(RUN, steps=1), some),
        (replace(RUN, train_tok_per_s=0.0), some),
        (RUN, replace(some, tok_per_s=0.0)),
    ]:
        advice = advise(run, kind)
        assert (advice.count, advice.why, advice.tokens_per_usd_now) == (2, NOT_YET, None)
    assert advise(RUN, some, [replace(SPOT, name="new", now=1, tok_per_s=0.0)]).why == NOT_YET
    for price in (None, 0.0):
        advice = advise(replace(RUN, trainer_usd_per_h=price), some)
        assert (advice.count, advice.why) == (2, "no price is known for the trainer: set a price in the lease")
    assert "for spot:" in advise(RUN, replace(some, usd_per_h=None)).why
    assert "for borrowed:" in advise(RUN, some, [replace(SPOT, name="borrowed", now=1, usd_per_h=None)]).why
    assert advise(RUN, some, [replace(SPOT, name="none", usd_per_h=None)]).count == 5, (
        "there are no workers of that kind"
    )


def test_other_kinds_are_taken_into_account() -> None:
    others = [WorkerKind(name="reserved", now=2, tok_per_s=6e3, usd_per_h=9.0)]
    assert advise(RUN, SPOT, others).count == 2
    assert advise(RUN, SPOT, [replace(others[0], now=4)]).count == 0
    assert advise(RUN, SPOT, [replace(others[0], now=4)]).why == "training is the bottleneck: one more would only wait"


def test_free_workers_are_taken_as_long_as_they_help() -> None:
    assert advise(RUN, replace(SPOT, usd_per_h=0.0)).count == 5


def test_trainer_without_an_engine_needs_workers() -> None:
    run = replace(RUN, local_tok_per_s=0.0)
    advice = advise(run, SPOT)
    assert (advice.count, value_curve(run, SPOT)[0].tok_per_s, advice.tokens_per_usd_now) == (5, 0.0, 0.0)
    assert advise(run, replace(SPOT, usd_per_h=500.0)).count > 0


def test_losses_and_slow_boots_reduce_the_rate() -> None:
    def useful(**changes: float) -> float:
        return replace(SPOT, **changes).useful_tok_per_s(RUN, 1, 1)  # pyright: ignore

    assert useful(boot_s=120.0) == SPOT.tok_per_s
    assert useful(boot_s=120.0, losses_per_h=30.0) == pytest.approx(SPOT.tok_per_s / 2)
    flapping = replace(SPOT, boot_s=60.0, losses_per_h=600.0)
    assert advise(RUN, replace(flapping, now=3)).count == 0


@given(
    train=rates, local=st.just(0.0) | rates, rate=rates, price=st.floats(0, 100), now=st.integers(0, 20),
    losses_per_h=st.floats(0, 10), trainer=st.floats(0.1, 100), asynchronous=st.booleans(),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_advice_is_consistent(
    train: float, local: float, rate: float, price: float, now: int, losses_per_h: float, trainer: float,
    asynchronous: bool,
) -> None:  # fmt: skip
    run = RunMeasurements(
        steps=2, tokens_per_step=1e5, train_tok_per_s=train, local_tok_per_s=local, trainer_usd_per_h=trainer,
        asynchronous=asynchronous,
    )  # fmt: skip
    kind = WorkerKind(
        name="spot", now=now, tok_per_s=rate, usd_per_h=price, boot_s=60, losses_per_h=losses_per_h, max_count=30
    )
    advice = advise(run, kind)
    assert advice.why.split(":")[0] in {
        "generation is the bottleneck", "training is the bottleneck", "no change",
        f"{now - advice.count} of {now} add less than they cost",
    }  # fmt: skip
    curve = value_curve(run, kind)
    points = {p.workers: p for p in curve}
    assert (advice.tokens_per_usd_now, advice.tokens_per_usd_best) == (
        points[now].tokens_per_usd, points[advice.count].tokens_per_usd,
    )  # fmt: skip
    if advice.count != now:
        assert points[advice.count].tokens_per_usd >= points[now].tokens_per_usd * (1 + MIN_GAIN)
    else:
        assert max(p.tokens_per_usd for p in curve[:31]) < points[now].tokens_per_usd * (1 + MIN_GAIN) or (
            points[now].tokens_per_usd == 0
        )
    followed = advise(run, replace(kind, now=advice.count))
    assert followed.count == advice.count, "advice does not change after it is followed"
    speeds = [p.tok_per_s for p in curve]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(speeds))


@given(train=rates, local=st.just(0.0) | rates, fleet=st.just(0.0) | rates, overlap=st.booleans())
def test_asynchronous_speed_is_that_of_the_bottleneck(train: float, local: float, fleet: float, overlap: bool) -> None:
    run = RunMeasurements(
        steps=2, tokens_per_step=1e5, train_tok_per_s=train, local_tok_per_s=local, trainer_usd_per_h=1.0,
        asynchronous=True, overlap=overlap,
    )  # fmt: skip
    if local + fleet == 0:
        assert step_s(run, 0.0) == float("inf")
        return
    speed = 1e5 / step_s(run, fleet)
    assert speed <= train * (1 + 1e-9)
    generated = fleet + local * (1 - speed / train)  # the trainer's engine generates while nothing is trained
    assert speed == pytest.approx(min(train, generated)) or generated >= speed == pytest.approx(train)
    assert speed >= 1e5 / step_s(replace(run, asynchronous=False), fleet) * (1 - 1e-9), "a barrier only costs time"


def test_asynchronous_training_needs_no_pipelining_to_overlap() -> None:
    """Without overlap, synchronous training gains from workers that generate faster than it trains."""
    run = replace(RUN, local_tok_per_s=0.0, overlap=False, asynchronous=True)
    advice = advise(run, replace(SPOT, now=8))
    assert (advice.count, advice.why) == (5, "training is the bottleneck: 3 of 8 only wait")
    assert advise(run, replace(SPOT, now=5)).count == 5
    assert advise(replace(run, asynchronous=False), replace(SPOT, now=5)).count > 5
    assert advise(run, replace(SPOT, now=2)).why == "generation is the bottleneck: 3 more would pay off"
