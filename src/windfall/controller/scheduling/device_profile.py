"""The speed profile that workers of one device share, and how much slower each worker is. Pure.

    step time = slowdown * (fixed + per_response * batch + per_context_token * tokens in the context of the whole batch)

If only the batch size were considered, a worker with long responses would look slow and one that has just begun would
look fast, because reading the KV cache takes time, too. So the three coefficients are fitted to the measurements of all
workers of a device. The fit minimizes the relative error, slowly forgets older measurements, and allows no coefficient
below 0. A worker has one value of its own, its slowdown. A slowdown within NOISE counts as none; otherwise noise would
give one of two equal workers twice as many responses as the other. A change is accepted after three windows. Workers
that do not report their context are not included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from windfall.controller.scheduling.least_squares import non_negative

RETAIN = 0.999
"""Factor by which each new window multiplies the weight of all older measurements."""
MIN_WINDOWS = 16
"""Number of windows before a device has a profile."""
MIN_REFIT_WINDOWS = 4
"""Minimum number of windows between two fits."""
NOISE = math.log(1.15)
"""A slowdown whose logarithm is below this counts as none."""
GAIN, FAST_GAIN = 0.05, 0.5
"""Weight of a new window in a slowdown: GAIN normally, FAST_GAIN from the third deviating window in a row."""
DEVIATION, MAX_DEVIATION = math.log(1.3), math.log(4)
"""A window deviates if its log ratio exceeds DEVIATION. Values above MAX_DEVIATION are clipped."""
MIN_RATIO = 1 / 4096
"""Minimum of fixed / per_response and of per_response / fixed."""
MIN_TOKENS = 2
"""Minimum tokens per response in a window; shorter windows are mostly noise."""


@dataclass(slots=True)
class Window:
    """Tokens that a worker generated in an interval of time."""

    tokens: float = 0
    seconds: float = 0.0
    batch_seconds: float = 0.0
    """Seconds times batch size."""
    context_seconds: float = 0.0
    """Seconds times tokens in the context of the batch."""

    @property
    def batch(self) -> float:
        return self.batch_seconds / self.seconds

    @property
    def step_s(self) -> float:
        """Seconds per token of one response."""
        return self.batch_seconds / self.tokens

    def add(self, other: Window) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.batch_seconds += other.batch_seconds
        self.context_seconds += other.context_seconds


def streak(before: int, deviation: float, bound: float) -> int:
    """Number of windows in a row that deviated by more than the bound, including this one; negative if the worker was
    faster than expected.

    >>> streak(2, 0.5, 0.2), streak(2, 0.1, 0.2), streak(2, -0.5, 0.2)
    (3, 0, -1)
    """
    side = (deviation > bound) - (deviation < -bound)
    return side * (1 + abs(before)) if side * before >= 0 else side


@dataclass(slots=True)
class _Device:
    products: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    """Weighted sums of products of (1, batch, context, step time), each divided by the expected step time."""
    windows: int = 0
    fit: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds: fixed, per response, per token in the context."""
    log_slowdown: float = 0.0
    """Median over its workers."""
    refit_in: int = 0
    """Windows until fit and median are computed again. One window of one worker changes them little."""
    coefficients: tuple[float, float, float] | None = None
    """Those of its workers that have no slowdown: computed once for all of them. None: not since the last window."""

    def add(self, batch: float, context: float, step_s: float, expected_s: float) -> None:
        row = np.array([1.0, batch, context, step_s]) / expected_s
        self.products = RETAIN * self.products + np.outer(row, row)
        self.windows += 1
        self.refit_in -= 1


@dataclass(slots=True)
class _Worker:
    device: _Device
    log_slowdown: float = 0.0
    """Logarithm of how many times slower it is than its device's fit."""
    windows: int = 0
    streak: int = 0
    current: Window = field(default_factory=Window)

    def learn(self, log_ratio: float) -> None:
        """`log_ratio`: logarithm of measured / expected step time."""
        deviation = log_ratio - self.log_slowdown
        self.streak = streak(self.streak, deviation, DEVIATION)
        self.windows += 1
        gain = FAST_GAIN if abs(self.streak) >= 3 else max(GAIN, 1 / (self.windows + MIN_WINDOWS))
        self.log_slowdown += deviation * gain


class DeviceProfiles:
    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._workers: dict[str, _Worker] = {}
        self.context = 0.0
        """Mean number of tokens in the context of one response."""
        self._windows = 0

    def join(self, worker: str, device: str) -> None:
        self._workers[worker] = _Worker(self._devices.setdefault(device, _Device()))

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: str, window: Window) -> None:
        known = self._workers.get(worker)
        if known is None or window.context_seconds <= 0:
            return
        known.current.add(window)
        if known.current.tokens >= MIN_TOKENS * known.current.batch:
            self._learn(known, known.current)
            known.current = Window()

    def _learn(self, known: _Worker, window: Window) -> None:
        batch, context, step_s = window.batch, window.context_seconds / window.seconds, window.step_s
        device, expected_s = known.device, step_s
        if device.windows >= MIN_WINDOWS:
            if device.refit_in <= 0:
                self._refit(device)
            fixed, per_response, per_context_token = device.fit
            expected_s = fixed + per_response * batch + per_context_token * context
            log_ratio = max(-MAX_DEVIATION, min(MAX_DEVIATION, math.log(step_s / expected_s)))
            known.learn(log_ratio)
            # Slowdowns are relative to each other, not to the fit; otherwise both could drift away together.
            step_s = expected_s * math.exp(log_ratio - known.log_slowdown + device.log_slowdown)
        device.add(batch, context, step_s, expected_s)
        self._windows += 1
        self.context += (context / batch - self.context) / min(self._windows, 1000)
        for other in self._devices.values():
            other.coefficients = None

    def _refit(self, device: _Device) -> None:
        slowdowns = sorted(w.log_slowdown for w in self._workers.values() if w.device is device and w.windows)
        fixed, per_response, per_context_token = non_negative(device.products)
        device.fit = fixed, per_response, per_context_token
        device.log_slowdown = slowdowns[len(slowdowns) // 2] if slowdowns else 0.0
        device.refit_in = max(MIN_REFIT_WINDOWS, len(slowdowns))

    def coefficients(self, worker: str) -> tuple[float, float, float] | None:
        """(fixed_s, each_s, context_s) of a worker. `each_s` includes the mean context; every further context
        token adds `context_s`. None: too little has been measured."""
        known = self._workers.get(worker)
        if known is None or not any(known.device.fit):
            return None
        if abs(known.log_slowdown) > NOISE:
            return self._slower(known.device, math.exp(known.log_slowdown))
        if known.device.coefficients is None:
            known.device.coefficients = self._slower(known.device, 1.0)
        return known.device.coefficients

    def _slower(self, device: _Device, slowdown: float) -> tuple[float, float, float]:
        fixed, per_response, per_context_token = device.fit
        per_response += per_context_token * self.context
        fixed = max(fixed, per_response * MIN_RATIO)
        return slowdown * fixed, slowdown * max(per_response, fixed * MIN_RATIO), slowdown * per_context_token
