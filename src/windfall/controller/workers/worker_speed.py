"""The speed of each worker at every batch size, learned from the tokens that arrive. Pure: the caller measures time.

    step time = slowdown * (fixed + per_response * batch + per_context_token * tokens in the context of the whole batch)

If only the batch size were considered, a worker with long responses would look slow and one that has just begun would
look fast, because reading the KV cache takes time, too. So the three coefficients are fitted to the measurements of all
workers of a device, and a worker has one value of its own, its slowdown. Until a device has MIN_WINDOWS measurements,
each of its workers has a line over the batch size, without contexts.

Rules:
- Tokens count for the batch size at which they were generated; sizes within half an octave count as one size.
- A worker is assumed to become slower or faster at all batch sizes alike: a measurement at one size changes all sizes.
  So a change is accepted after three windows, and what was learned about the other sizes is kept.
- One outlier has little effect: its deviation is limited to a factor of four and has a weight of a tenth.
- Unseen batch sizes are predicted from workers of the same device, or else from all, scaled to the worker's own speed.
- The fit of a device slowly forgets older measurements. A slowdown within NOISE counts as none; otherwise noise would
  give one of two equal workers twice as many responses as the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from windfall.step_time import StepPoint, StepTime, fit, non_negative
from windfall.types import is_local

WINDOW_FRAMES, WINDOW_MIN_S, WINDOW_MAX_S = 8, 0.1, 2.0
"""A window has 8 frames and at least 0.1 s, or all frames of 2 s; shorter windows are mostly noise."""
MAX_DEVIATION = math.log(4)
"""Log ratios of measured and expected step times are clipped to this."""
SIZE_GAIN, SIZE_DEVIATION = 0.1, math.log(1.2)
"""Weight of a new window at one batch size, and the log ratio above which the window deviates."""
SLOWDOWN_GAIN, SLOWDOWN_DEVIATION = 0.05, math.log(1.3)
"""The same for the slowdown of a worker."""
FAST_GAIN = 0.5
"""Weight of a new window from the third deviating window in a row."""
ENOUGH_WINDOWS = 8
"""Number of windows after which a batch size is well known; further windows do not raise its weight."""
MIN_RATIO = 1 / 4096
"""Minimum of each_s / fixed_s and of fixed_s / each_s, so that no response is free."""
PRIOR_WEIGHT = 0.25
"""Weight of the prior, in windows, at a batch of one and at four times the largest batch seen."""
PREFILL_WEIGHT = 0.3
"""Weight of the newest prefill in the average."""
RETAIN = 0.999
"""Factor by which each new window multiplies the weight of all older measurements of a device."""
MIN_WINDOWS = 16
"""Number of windows before a device has coefficients of its own."""
MIN_REFIT_WINDOWS = 4
"""Minimum number of windows between two fits of a device."""
NOISE = math.log(1.15)
"""A slowdown whose logarithm is below this counts as none."""
MIN_TOKENS = 2
"""Minimum tokens per response in a window of a device; shorter windows are mostly noise."""
UNKNOWN = StepTime(fixed_s=1.0, each_s=1 / 32)
"""The step time assumed before any measurement. Only the ratio of the two numbers has a meaning."""


@dataclass(slots=True)
class _Window:
    """Tokens that a worker generated in an interval of time."""

    size: int = 0
    """Half-octave of the batch size."""
    frames: int = 0
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

    def add(self, other: _Window) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.batch_seconds += other.batch_seconds
        self.context_seconds += other.context_seconds


@dataclass(slots=True)
class _Average:
    """The logarithm of a time or of a ratio, averaged over windows."""

    log: float = 0.0
    windows: int = 0
    streak: int = 0
    """Windows in a row that deviated, including the last one; negative: faster than expected."""

    def gain(self, deviation: float, bound: float, least: float, prior: int) -> float:
        """The weight of a window with this deviation. `prior`: windows that the average counted for before the first.

        >>> average = _Average()
        >>> [average.gain(x, bound=0.2, least=0.1, prior=1) for x in (0.5, 0.5, 0.1, -0.5, -0.5, -0.5)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
        """
        side = (deviation > bound) - (deviation < -bound)
        self.streak = side * (1 + abs(self.streak)) if side * self.streak >= 0 else side
        return FAST_GAIN if abs(self.streak) >= 3 else max(least, 1 / (self.windows + prior))


@dataclass(slots=True)
class _Size(_Average):
    """The logarithm of the step time at one batch size."""

    batch: float = 0.0


@dataclass(slots=True)
class _Device:
    """What the workers of one device share."""

    products: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    """Weighted sums of products of (1, batch, context, step time), each divided by the expected step time."""
    windows: int = 0
    fitted: StepTime | None = None
    log_slowdown: float = 0.0
    """Median over its workers."""
    refit_in: int = 0
    """Windows until fit and median are computed again. One window of one worker changes them little."""
    usual: StepTime | None = None
    """The step time of workers without a slowdown, with the usual context. None: not computed since the last window."""

    def add(self, batch: float, context: float, step_s: float, expected_s: float) -> None:
        row = np.array([1.0, batch, context, step_s]) / expected_s
        self.products = RETAIN * self.products + np.outer(row, row)
        self.windows += 1
        self.refit_in -= 1


@dataclass(slots=True)
class _Worker:
    kind: str
    """The name of its device."""
    device: _Device
    sizes: dict[int, _Size] = field(default_factory=dict)
    window: _Window | None = None
    device_window: _Window = field(default_factory=_Window)
    """The window for the fit of the device, which may consist of several."""
    slowdown: _Average = field(default_factory=_Average)
    """Logarithm of how many times slower the worker is than the fit of its device."""
    line: StepTime | None = None
    """The line over the batch sizes; None if there are newer measurements."""

    def fitted(self, prior: StepTime) -> StepTime:
        """The line of a worker with at least one measurement."""
        if self.line is None:
            self.line = _fit(self.sizes.values(), prior)
        return self.line

    def learn(self, window: _Window, prior: StepTime) -> None:
        batch, log_s, known = window.batch, math.log(window.step_s), self.sizes.get(window.size)
        if known is None:
            if self.sizes:
                expected = math.log(self.fitted(prior).step_s(batch))
                log_s = expected + _clip(log_s - expected)
            self.sizes[window.size] = _Size(log_s, windows=1, batch=batch)
        else:
            deviation = _clip(log_s - known.log)
            gain = known.gain(deviation, SIZE_DEVIATION, SIZE_GAIN, prior=1)
            # With few windows, the first ones may have been outliers: then the other sizes do not change.
            for other in self.sizes.values() if known.windows >= ENOUGH_WINDOWS else (known,):
                other.log += deviation * gain
            known.batch += (batch - known.batch) * gain
            known.windows += 1
        self.line = None


class WorkerSpeeds:
    """The step times of all workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._devices: dict[str, _Device] = {}
        """By name. The trainer's own engine counts as another device, because it shares its machine."""
        self._typical: dict[str | None, StepTime] = {}
        """Median line by device; None: of all devices. It is kept when the last worker of a device is gone."""
        self._new_windows = 0
        self._usual_context = 0.0
        """Mean number of tokens in the context of one response."""
        self._device_windows = 0
        self._prefill_s: dict[str, float] = {}
        """Seconds to prefill one token, by device."""

    def join(self, worker: str, device: str) -> None:
        name = f"{device} of the trainer" if is_local(worker) else device
        self._workers[worker] = _Worker(device, self._devices.setdefault(name, _Device()))

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: str, batch: int, tokens: int, seconds: float, context: float = 0.0) -> None:
        """The worker had `batch` responses for `seconds` and generated `tokens`. `context`: tokens in the context of
        all of them; 0: not known. Time without work must not be included."""
        if batch <= 0 or tokens < 0 or not 0 <= seconds < math.inf:
            return
        if worker not in self._workers:
            self.join(worker, "")
        known = self._workers[worker]
        size = (batch * batch).bit_length()  # half-octaves
        window = known.window
        if window is None or window.size != size:
            self._close(known)
            window = known.window = _Window(size)
        window.frames += 1
        window.tokens += tokens
        window.seconds += seconds
        window.batch_seconds += seconds * batch
        window.context_seconds += seconds * context
        if window.seconds >= WINDOW_MIN_S and (window.frames >= WINDOW_FRAMES or window.seconds >= WINDOW_MAX_S):
            self._close(known)

    def _close(self, known: _Worker) -> None:
        window = known.window
        if window is None or not window.tokens or not window.seconds:
            return  # no tokens yet: the time counts for the next window, unless the batch changes
        known.window = None
        if window.context_seconds > 0:
            known.device_window.add(window)
            if known.device_window.tokens >= MIN_TOKENS * known.device_window.batch:
                self._learn_device(known, known.device_window)
                known.device_window = _Window()
        known.learn(window, self._prior(known))
        self._new_windows += 1
        if known.kind not in self._typical or self._new_windows >= max(ENOUGH_WINDOWS, len(self._workers)):
            self._new_windows = 0
            self._compare()

    def _prior(self, known: _Worker) -> StepTime:
        return self._typical.get(known.kind) or self._typical.get(None) or UNKNOWN

    def _compare(self) -> None:
        """Computes the median line of every device and of all devices."""
        by_device: dict[str, list[StepTime]] = {}
        for known in self._workers.values():
            if known.sizes:
                by_device.setdefault(known.kind, []).append(known.fitted(self._prior(known)))
        for device, lines in by_device.items():
            self._typical[device] = _median(lines)
        self._typical[None] = _median([line for lines in by_device.values() for line in lines])

    def _learn_device(self, known: _Worker, window: _Window) -> None:
        batch, context, step_s = window.batch, window.context_seconds / window.seconds, window.step_s
        device, expected_s = known.device, step_s
        if device.windows >= MIN_WINDOWS:
            if device.fitted is None or device.refit_in <= 0:
                device.fitted = self._refit(device)
            expected_s = device.fitted.step_s(batch, context)
            log_ratio = _clip(math.log(step_s / expected_s))
            slowdown = known.slowdown
            deviation = log_ratio - slowdown.log
            slowdown.windows += 1
            slowdown.log += deviation * slowdown.gain(deviation, SLOWDOWN_DEVIATION, SLOWDOWN_GAIN, prior=MIN_WINDOWS)
            # Slowdowns are relative to each other, not to the fit; otherwise both could drift away together.
            step_s = expected_s * math.exp(log_ratio - slowdown.log + device.log_slowdown)
        device.add(batch, context, step_s, expected_s)
        self._device_windows += 1
        self._usual_context += (context / batch - self._usual_context) / min(self._device_windows, 1000)
        for other in self._devices.values():
            other.usual = None

    def _refit(self, device: _Device) -> StepTime:
        workers = [w for w in self._workers.values() if w.device is device and w.slowdown.windows]
        slowdowns = sorted(w.slowdown.log for w in workers)
        device.log_slowdown = slowdowns[len(slowdowns) // 2] if slowdowns else 0.0
        device.refit_in = max(MIN_REFIT_WINDOWS, len(slowdowns))
        fixed_s, each_s, context_s = non_negative(device.products)
        return StepTime(fixed_s=fixed_s, each_s=each_s, context_s=context_s)

    def profile(self, worker: str) -> StepTime | None:
        """The step time of a worker with the usual context. None: no worker has been measured yet."""
        known = self._workers.get(worker)
        if known is None:
            return self._typical.get(None)
        device = known.device
        if device.fitted is not None:
            if abs(known.slowdown.log) > NOISE:
                return self._with_usual_context(device.fitted, math.exp(known.slowdown.log))
            if device.usual is None:
                device.usual = self._with_usual_context(device.fitted, 1.0)
            return device.usual
        if known.sizes:
            return known.fitted(self._prior(known))
        return self._typical.get(known.kind) or self._typical.get(None)

    def _with_usual_context(self, time: StepTime, slowdown: float) -> StepTime:
        each_s = time.each_s + time.context_s * self._usual_context
        fixed_s = max(time.fixed_s, each_s * MIN_RATIO)
        return StepTime(
            fixed_s=slowdown * fixed_s,
            each_s=slowdown * max(each_s, fixed_s * MIN_RATIO),
            context_s=slowdown * time.context_s,
            usual_context=self._usual_context,
        )

    def measured(self, worker: str) -> dict[int, StepPoint]:
        """Step times by half-octave of the batch size; their weights are numbers of windows."""
        known = self._workers.get(worker)
        sizes = known.sizes if known is not None else {}
        return {n: StepPoint(s.batch, math.exp(s.log), s.windows) for n, s in sizes.items()}

    def tok_per_s(self, worker: str, batch: int) -> float:
        """0: no worker has been measured yet."""
        time = self.profile(worker)
        return time.tok_per_s(batch) if time is not None else 0.0

    def prefilled(self, worker: str, tokens: int, seconds: float) -> None:
        """The worker prefilled `tokens` in `seconds`, not counting its decode steps."""
        known = self._workers.get(worker)
        if known is not None and tokens > 0 and seconds > 0:
            old, new = self._prefill_s.get(known.kind), seconds / tokens
            self._prefill_s[known.kind] = new if old is None else old + PREFILL_WEIGHT * (new - old)

    def prefill_tok_per_s(self, worker: str) -> float:
        """Prefill speed in tokens per second; 0: not known."""
        known = self._workers.get(worker)
        prefill_s = self._prefill_s.get(known.kind) if known is not None else None
        return 1 / prefill_s if prefill_s else 0.0


def _fit(sizes: Iterable[_Size], prior: StepTime) -> StepTime:
    """Fits step time over batch size. Far from measurements, it follows the scaled `prior`."""
    points = [(s.batch, math.exp(s.log), float(min(s.windows, ENOUGH_WINDOWS))) for s in sizes]
    fixed_s, each_s = prior.fixed_s, prior.each_s
    weight = sum(w for _, _, w in points)
    slowdown = math.exp(sum(w * math.log(y / (fixed_s + each_s * x)) for x, y, w in points) / weight)
    fixed_s *= slowdown
    each_s *= slowdown
    far = 4 * max(x for x, _, _ in points)
    points.append((1.0, fixed_s + each_s, PRIOR_WEIGHT))
    points.append((far, fixed_s + each_s * far, PRIOR_WEIGHT))
    return fit(points, MIN_RATIO)


def _median(lines: list[StepTime]) -> StepTime:
    at = len(lines) // 2
    return StepTime(fixed_s=sorted(p.fixed_s for p in lines)[at], each_s=sorted(p.each_s for p in lines)[at])


def _clip(deviation: float) -> float:
    return max(-MAX_DEVIATION, min(MAX_DEVIATION, deviation))
