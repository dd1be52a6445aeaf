"""Profiles learned from noisy measurements: what is recovered, what is predicted, what is forgotten."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.workers.worker_speed import WorkerSpeeds
from windfall.step_time import StepTime

ENGINE = StepTime(fixed_s=0.010, each_s=0.0001)


def show(
    speeds: WorkerSpeeds, worker: str, profile: StepTime, batches: Iterable[int], *, frames: int = 100, noise: float =
    0.0, seed: int = 0,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    for batch in batches:
        for _ in range(frames):
            speeds.observe(worker, batch, batch, profile.step_s(batch) * rng.lognormvariate(0, noise))


def off(speeds: WorkerSpeeds, worker: str, profile: StepTime, batches: Iterable[int]) -> float:
    """The largest error of the throughput, as a factor."""
    ratios = [speeds.tok_per_s(worker, b) / profile.tok_per_s(b) for b in batches]
    return max(max(r, 1 / r) for r in ratios)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("fixed_s", "share"), [(0.0002, 0.01), (0.002, 0.005), (0.02, 0.002), (0.02, 0.2)])
def test_profile_is_recovered_from_noise(fixed_s: float, share: float, seed: int) -> None:
    profile = StepTime(fixed_s=fixed_s, each_s=fixed_s * share)
    speeds = WorkerSpeeds()
    show(speeds, "a", profile, [4, 64, 16, 32], frames=2000, noise=0.3, seed=seed)
    assert off(speeds, "a", profile, [2, 8, 50, 100]) < 1.35


def test_measurements_of_a_real_engine() -> None:
    """A decode step of a 0.6B model on one large GPU, measured: 64, 256 and 512 responses. Two predict the third."""
    measured = {64: 24_900, 256: 53_200, 512: 66_300}
    speeds = WorkerSpeeds()
    for batch in (64, 256):
        for _ in range(1000):
            speeds.observe("a", batch, batch, batch / measured[batch])
    assert speeds.tok_per_s("a", 512) == pytest.approx(measured[512], rel=0.05)
    profile = speeds.profile("a")
    assert profile is not None
    assert 100 < profile.fixed_s / profile.each_s < 200


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000), st.floats(1e-6, 10)), min_size=1, max_size=60),
    st.integers(1, 200),
)
def test_throughput_grows_with_the_batch_ever_more_slowly(observed: list[tuple[int, int, float]], batch: int) -> None:
    speeds = WorkerSpeeds()
    for b, tokens, s in observed:
        speeds.observe("a", b, tokens, s)
    profile = speeds.profile("a")
    if profile is None:
        assert speeds.tok_per_s("a", batch) == 0
        return
    assert profile.fixed_s > 0
    assert profile.each_s > 0
    one, two, three = (speeds.tok_per_s("a", n) for n in (batch, batch + 1, batch + 2))
    assert 0 < one < two < three
    assert three - two <= (two - one) * (1 + 1e-6)


def test_larger_batch_that_seems_faster_gives_a_flat_line() -> None:
    """This is impossible, so the line is as flat as allowed."""
    speeds = WorkerSpeeds()
    for batch, s in ((4, 0.03), (64, 0.02)):
        for _ in range(300):
            speeds.observe("a", batch, batch, s)
    profile = speeds.profile("a")
    assert profile is not None
    assert 0.02 < profile.step_s(4) < profile.step_s(64) < 0.03


def test_one_batch_size_predicts_the_others() -> None:
    speeds = WorkerSpeeds()
    speeds.join("known", "gpu")
    speeds.join("slow", "gpu")
    show(speeds, "known", ENGINE, [8, 64, 128], frames=500)
    show(speeds, "slow", ENGINE.slower(4), [64], frames=16)
    assert off(speeds, "slow", ENGINE.slower(4), [8, 64, 256]) < 1.1


def test_new_worker_is_assumed_like_others_of_its_device_or_like_all() -> None:
    speeds = WorkerSpeeds()
    assert speeds.profile("a") is None
    assert speeds.tok_per_s("a", 8) == 0
    for name, device, factor in (("a", "gpu", 1), ("b", "gpu", 1), ("c", "gpu", 1), ("d", "cpu", 10)):
        speeds.join(name, device)
        show(speeds, name, ENGINE.slower(factor), [8, 64, 128], frames=200)
    for name, device in (("new", "cpu"), ("odd", "tpu")):
        speeds.join(name, device)
    assert off(speeds, "new", ENGINE.slower(10), [16, 100]) < 1.1
    assert off(speeds, "odd", ENGINE, [16, 100]) < 1.1
    assert off(speeds, "unknown", ENGINE, [16, 100]) < 1.1
    speeds.forget("d")
    assert off(speeds, "new", ENGINE.slower(10), [16, 100]) < 1.1, "the profile of a device outlives its last worker"


def test_worker_that_becomes_slow_is_slow_at_every_batch_size() -> None:
    speeds = WorkerSpeeds()
    show(speeds, "a", ENGINE, [8, 128, 32], frames=300, noise=0.2)
    show(speeds, "a", ENGINE.slower(10), [32], frames=100, noise=0.2)
    assert off(speeds, "a", ENGINE.slower(10), [8, 32, 128]) < 1.4
    show(speeds, "a", ENGINE, [32], frames=200, noise=0.2)
    assert off(speeds, "a", ENGINE, [8, 32, 128]) < 1.4, "and fast again"


def test_one_odd_window_has_little_effect() -> None:
    speeds = WorkerSpeeds()
    show(speeds, "a", ENGINE, [32], frames=300)
    speeds.observe("a", 32, 32, 60.0)
    assert off(speeds, "a", ENGINE, [32]) < 1.5
    show(speeds, "a", ENGINE, [32], frames=64)
    assert off(speeds, "a", ENGINE, [32]) < 1.1


def test_frames_that_arrive_in_bursts() -> None:
    """Ten at once, then none for the time of ten steps; also frames of several steps."""
    speeds = WorkerSpeeds()
    for _ in range(60):
        for n in range(10):
            speeds.observe("a", 16, 16, 0.0 if n else 10 * ENGINE.step_s(16))
    assert off(speeds, "a", ENGINE, [16]) < 1.3
    for _ in range(200):
        speeds.observe("b", 16, 64, 4 * ENGINE.step_s(16))
    assert off(speeds, "b", ENGINE, [16]) < 1.1


def test_invalid_observations_are_ignored() -> None:
    speeds = WorkerSpeeds()
    for batch, tokens, s in ((0, 5, 1.0), (-1, 5, 1.0), (4, -1, 1.0), (4, 4, -1.0), (4, 4, math.nan), (4, 4, math.inf)):
        speeds.observe("a", batch, tokens, s)
    assert speeds.profile("a") is None
    for _ in range(100):
        speeds.observe("a", 4, 0, 1.0)  # time passes without tokens
    assert speeds.profile("a") is None
