"""Workers of one device share a profile: context and batch are separated, equal workers stay equal, a slow one is
found."""

from __future__ import annotations

import math
import random

import pytest

from windfall.controller.workers.worker_speed import WorkerSpeeds

FIXED_S, EACH_S, CONTEXT_S = 0.004, 0.00002, 4e-8


def step_s(batch: float, context: float) -> float:
    return FIXED_S + EACH_S * batch + CONTEXT_S * context


def play(speeds: WorkerSpeeds, levels: dict[str, float], *, steps: int = 3, noise: float = 0.1, seed: int = 0) -> None:
    """Every step begins with a full batch and little context, and ends with few long responses. Each worker begins at
    another time, so they are never all at the same point."""
    draw = random.Random(seed)
    for _ in range(steps):
        for at in range(30):
            for n, (name, level) in enumerate(levels.items()):
                x = (at / 30 + n / (2 * len(levels))) % 1
                batch = max(2, round(200 * (1 - x)))
                context = batch * (256 + 9000 * x)
                seconds = 20 * step_s(batch, context) * level * draw.lognormvariate(0, noise)
                speeds.observe(name, batch, 20 * batch, max(seconds, 2.0) if seconds > 2 else seconds, context)


def joined(*names: str) -> WorkerSpeeds:
    speeds = WorkerSpeeds()
    for name in names:
        speeds.join(name, "card")
    return speeds


@pytest.mark.parametrize("seed", range(3))
def test_equal_workers_have_equal_profiles(seed: int) -> None:
    names = ["a", "b", "c", "d"]
    speeds = joined(*names)
    play(speeds, dict.fromkeys(names, 1.0), noise=0.25, seed=seed)
    profiles = [speeds.profile(name) for name in names]
    assert all(p is profiles[0] for p in profiles), "computed once for all of them"
    play(speeds, dict.fromkeys(names, 1.0), noise=0.25, seed=seed, steps=1)
    assert speeds.profile("a") != profiles[0]


def test_time_per_context_token_is_separated_from_time_per_response() -> None:
    speeds = joined("a", "b")
    play(speeds, {"a": 1.0, "b": 1.0})
    found = speeds._devices["card"].fitted
    assert found is not None
    fixed, each, per_context_token = found.fixed_s, found.each_s, found.context_s
    assert fixed == pytest.approx(FIXED_S, rel=0.3)
    assert per_context_token == pytest.approx(CONTEXT_S, rel=0.2)
    assert each < 6 * EACH_S


def test_slow_worker_is_found_and_a_new_one_is_assumed_usual() -> None:
    speeds = joined("a", "b", "slow", "new")
    play(speeds, {"a": 1.0, "b": 1.0, "slow": 2.0})
    usual, slow, new = (speeds.profile(name) for name in ("a", "slow", "new"))
    assert usual is not None
    assert slow is not None
    assert slow.step_s(100) / usual.step_s(100) == pytest.approx(2.0, rel=0.2)
    assert new == usual


def test_worker_that_becomes_slow_is_noticed_soon() -> None:
    speeds = joined("a", "b", "c")
    play(speeds, dict.fromkeys("abc", 1.0))
    before = speeds.profile("c")
    for _ in range(12):
        speeds.observe("c", 100, 2000, 20 * 5 * step_s(100, 300_000), 300_000)
    after = speeds.profile("c")
    assert before is not None
    assert after is not None
    assert after.step_s(100) > 2.5 * before.step_s(100)


def test_local_is_a_device_of_its_own() -> None:
    speeds = joined("a")
    speeds.join("local", "card")
    play(speeds, {"a": 1.0, "local": 0.25})
    a, local = speeds.profile("a"), speeds.profile("local")
    assert a is not None
    assert local is not None
    assert a.step_s(100) / local.step_s(100) == pytest.approx(4.0, rel=0.2)


def test_prefill_speed_is_measured_per_device() -> None:
    speeds = joined("a", "b")
    assert speeds.prefill_tok_per_s("a") == 0
    for _ in range(10):
        speeds.prefilled("a", 10_000, 0.5)
    assert speeds.prefill_tok_per_s("b") == pytest.approx(20_000)
    speeds.prefilled("a", 0, 1.0)
    speeds.prefilled("a", 10, -1.0)
    assert math.isclose(speeds.prefill_tok_per_s("a"), 20_000)
