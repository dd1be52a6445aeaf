"""The speed profile that workers of one device share, and how much slower each worker is. Pure.

    step time = level * (fixed + each * batch + per_context_token * (tokens in the context of the whole batch))

If only the batch size were considered, a worker with long responses would look slow and one that has just begun would
look fast, because reading the KV cache takes time, too. So the three coefficients are fitted to the measurements of
every worker of a device: in relative error, with older measurements slowly forgotten, and with no coefficient below 0.
A worker has one value of its own, its level. Levels within EQUAL of the usual one count as equal; otherwise noise would
give one of two equal workers twice as many responses as the other. A change of level is believed after three windows.
Workers that do not report their context are not included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from windfall.scheduling.least_squares import non_negative

RETAIN = 0.999
"""Weight that older measurements keep with every new window."""
MIN_WINDOWS = 16
"""Windows before a device has a profile."""
MIN_REFIT_WINDOWS = 4
"""Minimum number of windows between two fits."""
EQUAL = math.log(1.15)
"""Levels (logarithms) below this count as 0."""
GAIN, FAST_GAIN = 0.05, 0.5
"""Weight of a new window in a level: GAIN normally, FAST_GAIN from the third deviating window in a row."""
DEVIATION, MAX_DEVIATION = math.log(1.3), math.log(4)
"""A window deviates if its log ratio exceeds DEVIATION. Values above MAX_DEVIATION are clipped."""
MIN_RATIO = 1 / 4096
"""Minimum of fixed / each and of each / fixed."""
MIN_TOKENS = 2
"""Minimum tokens per response in a window; shorter windows are mostly noise."""


@dataclass(slots=True)
class _Device:
    products: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    """Weighted sums of products of (1, batch, context, step time), each divided by the expected step time."""
    windows: int = 0
    fit: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Seconds: fixed, per response, per token in the context."""
    level: float = 0.0
    """Median level (logarithm) of its workers."""
    refit_in: int = 0
    """Windows until the fit and the level are computed again. One window of one worker changes them little."""

    def add(self, batch: float, context: float, step_s: float, expected_s: float) -> None:
        row = np.array([1.0, batch, context, step_s]) / expected_s
        self.products = RETAIN * self.products + np.outer(row, row)
        self.windows += 1
        self.refit_in -= 1


def streak(before: int, off: float, bound: float) -> int:
    """Number of windows in a row that were off by more than the bound, including this one; negative if the worker was
    faster than expected.

    >>> streak(2, 0.5, 0.2), streak(2, 0.1, 0.2), streak(2, -0.5, 0.2)
    (3, 0, -1)
    """
    side = (off > bound) - (off < -bound)
    return side * (1 + abs(before)) if side * before >= 0 else side


@dataclass(slots=True)
class _Worker:
    device: str
    level: float = 0.0
    """Logarithm of how many times slower it is than its device's fit."""
    windows: int = 0
    streak: int = 0
    tokens: float = 0.0
    """Tokens of the current window."""
    seconds: float = 0.0
    """Seconds of the current window."""
    batch_seconds: float = 0.0
    """Seconds times batch size."""
    context_seconds: float = 0.0
    """Seconds times tokens in the context of the batch."""

    def learn(self, off: float) -> None:
        off -= self.level
        self.streak = streak(self.streak, off, DEVIATION)
        self.windows += 1
        self.level += off * (FAST_GAIN if abs(self.streak) >= 3 else max(GAIN, 1 / (self.windows + MIN_WINDOWS)))


class DeviceProfiles:
    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._workers: dict[str, _Worker] = {}
        self.context = 0.0
        """Mean number of tokens in the context of one response."""
        self._windows = 0

    def join(self, worker: str, device: str) -> None:
        self._workers[worker] = _Worker(device)

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: str, tokens: float, seconds: float, batch_seconds: float, context_seconds: float) -> None:
        """Tokens that a worker generated in `seconds`. `batch_seconds` and `context_seconds`: seconds times the batch
        size, and times the tokens in the context of the batch."""
        known = self._workers.get(worker)
        if known is None or context_seconds <= 0:
            return
        known.tokens, known.seconds = known.tokens + tokens, known.seconds + seconds
        known.batch_seconds += batch_seconds
        known.context_seconds += context_seconds
        batch, context = known.batch_seconds / known.seconds, known.context_seconds / known.seconds
        if known.tokens >= MIN_TOKENS * batch:
            self._learn(known, batch, context, known.batch_seconds / known.tokens)
            known.tokens = known.seconds = known.batch_seconds = known.context_seconds = 0.0

    def _learn(self, known: _Worker, batch: float, context: float, step_s: float) -> None:
        device, expected_s = self._devices.setdefault(known.device, _Device()), step_s
        if device.windows >= MIN_WINDOWS:
            if device.refit_in <= 0:
                self._refit(known.device, device)
            fixed, each, per_context_token = device.fit
            expected_s = fixed + each * batch + per_context_token * context
            off = max(-MAX_DEVIATION, min(MAX_DEVIATION, math.log(step_s / expected_s)))
            known.learn(off)
            # Levels are relative to each other, not to the fit; otherwise both could drift away together.
            step_s = expected_s * math.exp(off - known.level + device.level)
        device.add(batch, context, step_s, expected_s)
        self._windows += 1
        self.context += (context / batch - self.context) / min(self._windows, 1000)

    def _refit(self, name: str, device: _Device) -> None:
        levels = sorted(w.level for w in self._workers.values() if w.device == name and w.windows)
        fixed, each, per_context_token = non_negative(device.products)
        device.fit = fixed, each, per_context_token
        device.level = levels[len(levels) // 2] if levels else 0.0
        device.refit_in = max(MIN_REFIT_WINDOWS, len(levels))

    def line(self, worker: str) -> tuple[float, float, float] | None:
        """(fixed_s, each_s, context_s) of a worker. `each_s` includes the mean context; every further context
        token adds `context_s`. None: too little has been measured."""
        known = self._workers.get(worker)
        device = self._devices.get(known.device) if known is not None else None
        if known is None or device is None or not any(device.fit):
            return None
        fixed, each, per_context_token = device.fit
        level = math.exp(known.level) if abs(known.level) > EQUAL else 1.0
        each += per_context_token * self.context
        fixed = max(fixed, each * MIN_RATIO)
        return level * fixed, level * max(each, fixed * MIN_RATIO), level * per_context_token
