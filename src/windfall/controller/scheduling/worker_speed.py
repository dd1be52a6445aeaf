"""The speed of each worker at every batch size, learned from the tokens that arrive. Pure: the caller measures time.

    step time = slowdown * (fixed + per_response * batch + per_context_token * tokens in the context of the whole batch)

If only the batch size were considered, a worker with long responses would look slow and one that has just begun would
look fast, because reading the KV cache takes time, too. So the three coefficients are fitted to the measurements of all
workers of a device (step_time.py), and a worker has one value of its own, its slowdown. Until a device has MIN_WINDOWS
measurements, its steps are assumed to grow with the batch as those of UNKNOWN; an unmeasured device is assumed to be
like the one that is known best.

Rules:
- Tokens count for the batch size at which they were generated; sizes within half an octave count as one size.
- A worker is assumed to become slower or faster at all batch sizes alike. A change is accepted after three windows.
- One outlier has little effect: its deviation is limited to a factor of four and has a weight of a twentieth.
- The fit of a device slowly forgets older measurements. A slowdown within NOISE counts as none; otherwise noise would
  give one of two equal workers twice as many responses as the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from windfall.step_time import StepPoint, StepTime, non_negative
from windfall.types import LOCAL

WINDOW_FRAMES, WINDOW_MIN_S, WINDOW_MAX_S = 8, 0.1, 2.0
"""A window has 8 frames and at least 0.1 s, or all frames of 2 s; shorter windows are mostly noise."""
MAX_DEVIATION = math.log(4)
"""Log ratios of measured and expected step times are clipped to this."""
SLOWDOWN_GAIN, SLOWDOWN_DEVIATION = 0.05, math.log(1.3)
"""Weight of a new window in the slowdown of a worker, and the log ratio above which the window deviates."""
SCALE_GAIN = 0.25
"""Weight of a new window in the scale of a device, which is used while it has no fit."""
FAST_GAIN = 0.5
"""Weight of a new window from the third deviating window in a row."""
MIN_RATIO = 1 / 4096
"""Minimum of each_s / fixed_s and of fixed_s / each_s, so that no response is free."""
PRIOR_WEIGHT = 0.02
"""Weight, in windows, of UNKNOWN in a fit, at a batch of one and at four times the largest batch seen: measurements at
a single batch size say nothing about others."""
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
class _Device:
    """What the workers of one device share."""

    products: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    """Weighted sums of products of (1, batch, context, step time), each divided by the expected step time."""
    windows: int = 0
    largest: float = 0.0
    """The largest batch so far."""
    log_scale: float = 0.0
    """Recent mean of the logarithm of step times, each divided by that of UNKNOWN."""
    fitted: StepTime | None = None
    log_slowdown: float = 0.0
    """Median over its workers."""
    refit_in: int = 0
    """Windows until fit and median are computed again. One window of one worker changes them little."""
    usual: StepTime | None = None
    """The step time of workers without a slowdown, with the usual context. None: not computed since the last window."""
    prefill_s: float = 0.0
    """Seconds to prefill one token; 0: not known."""

    def add(self, batch: float, context: float, step_s: float, expected_s: float) -> None:
        row = np.array([1.0, batch, context, step_s]) / expected_s
        self.products = RETAIN * self.products + np.outer(row, row)
        self.windows += 1
        self.largest = max(self.largest, batch)
        self.refit_in -= 1
        deviation = math.log(step_s / UNKNOWN.step_s(batch)) - self.log_scale
        self.log_scale += deviation * max(SCALE_GAIN, 1 / self.windows)

    def scaled(self) -> StepTime:
        """The step time that is assumed while there is no fit."""
        return UNKNOWN.slower(math.exp(self.log_scale))


@dataclass(slots=True)
class _Worker:
    device: _Device
    sizes: dict[int, StepPoint] = field(default_factory=dict)
    """By half-octave of the batch size: means over its windows, of the step time the geometric one."""
    window: _Window | None = None
    device_window: _Window = field(default_factory=_Window)
    """The window for the fit of the device, which may consist of several."""
    log_slowdown: float = 0.0
    """Logarithm of how many times slower the worker is than the fit of its device."""
    windows: int = 0
    """Windows that it was learned from."""
    streak: int = 0
    """Windows in a row that deviated, including the last one; negative: faster than expected."""

    def note(self, window: _Window) -> None:
        batch, step_s, windows = self.sizes.get(window.size, StepPoint(window.batch, window.step_s, 0))
        share = 1 / (windows + 1)
        batch += share * (window.batch - batch)
        self.sizes[window.size] = StepPoint(batch, step_s * (window.step_s / step_s) ** share, windows + 1)

    def learn_slowdown(self, log_ratio: float, prior: int) -> float:
        """`prior`: windows that the slowdown counts for before the first. Returns what it does not explain of the
        ratio."""
        deviation = max(-MAX_DEVIATION, min(MAX_DEVIATION, log_ratio - self.log_slowdown))
        side = (deviation > SLOWDOWN_DEVIATION) - (deviation < -SLOWDOWN_DEVIATION)
        self.streak = side * (1 + abs(self.streak)) if side * self.streak >= 0 else side
        self.windows += 1
        usual_gain = max(SLOWDOWN_GAIN, 1 / (self.windows + prior))
        learned = deviation * (FAST_GAIN if abs(self.streak) >= 3 else usual_gain)
        self.log_slowdown += learned
        return deviation - learned


class WorkerSpeeds:
    """The step times of all workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._devices: dict[str, _Device] = {}
        """By name. The trainer's own engine counts as another device, because it shares its machine."""
        self._usual_context = 0.0
        """Mean number of tokens in the context of one response."""
        self._windows = 0

    def join(self, worker: str, device: str) -> None:
        local = worker.partition("#")[0] == LOCAL  # the trainer may have several engines
        name = f"{device} of the trainer" if local else device
        self._workers[worker] = _Worker(self._devices.setdefault(name, _Device()))

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: str, batch: int, tokens: int, seconds: float, context: float = 0.0) -> None:
        """The worker had `batch` responses for `seconds` and generated `tokens`. `context`: tokens in the context of
        all of them. Time without work must not be included."""
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
        known.note(window)
        known.device_window.add(window)
        if known.device_window.tokens >= MIN_TOKENS * known.device_window.batch:
            self._learn(known, known.device_window)
            known.device_window = _Window()

    def _learn(self, known: _Worker, window: _Window) -> None:
        batch, context, step_s = window.batch, window.context_seconds / window.seconds, window.step_s
        device, expected_s = known.device, step_s
        if device.windows >= MIN_WINDOWS and (device.fitted is None or device.refit_in <= 0):
            device.fitted = self._refit(device)
        if device.fitted is not None:
            expected_s = device.fitted.step_s(batch, context)
            left = known.learn_slowdown(math.log(step_s / expected_s), MIN_WINDOWS)
            # Slowdowns are relative to each other, not to the fit; otherwise both could drift away together.
            step_s = expected_s * math.exp(left + device.log_slowdown)
        elif device.windows:
            known.learn_slowdown(math.log(step_s / device.scaled().step_s(batch)), 1)
        device.add(batch, context, step_s, expected_s)
        self._windows += 1
        self._usual_context += (context / batch - self._usual_context) / min(self._windows, 1000)
        for other in self._devices.values():
            other.usual = None

    def _refit(self, device: _Device) -> StepTime:
        workers = [w for w in self._workers.values() if w.device is device and w.windows]
        if device.fitted is None:  # what seemed to be slow may have been an error of UNKNOWN
            for worker in workers:
                worker.log_slowdown = 0.0
        slowdowns = sorted(w.log_slowdown for w in workers)
        device.log_slowdown = slowdowns[len(slowdowns) // 2] if slowdowns else 0.0
        device.refit_in = max(MIN_REFIT_WINDOWS, len(slowdowns))
        products = device.products.copy()
        for batch in (1.0, 4 * device.largest):
            step_s = device.scaled().step_s(batch)
            row = np.array([1.0, batch, batch * self._usual_context, step_s]) / step_s
            products += PRIOR_WEIGHT * np.outer(row, row)
        fixed_s, each_s, context_s = non_negative(products)
        return StepTime(fixed_s=fixed_s, each_s=each_s, context_s=context_s)

    def profile(self, worker: str) -> StepTime | None:
        """The step time of a worker with the usual context. None: no worker has been measured yet."""
        known = self._workers.get(worker)
        device = known.device if known is not None else None
        if device is None or not device.windows:
            device = max(self._devices.values(), key=lambda d: d.windows, default=None)
            if device is None or not device.windows:
                return None
        elif known is not None and abs(known.log_slowdown) > NOISE:
            return self._with_usual_context(device, math.exp(known.log_slowdown))
        if device.usual is None:
            device.usual = self._with_usual_context(device, 1.0)
        return device.usual

    def _with_usual_context(self, device: _Device, slowdown: float) -> StepTime:
        time = device.fitted
        if time is None:
            return device.scaled().slower(slowdown)
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
        return known.sizes if known is not None else {}

    def tok_per_s(self, worker: str, batch: int) -> float:
        """0: no worker has been measured yet."""
        time = self.profile(worker)
        return time.tok_per_s(batch) if time is not None else 0.0

    def prefilled(self, worker: str, tokens: int, seconds: float) -> None:
        """The worker prefilled `tokens` in `seconds`, not counting its decode steps."""
        known = self._workers.get(worker)
        if known is not None and tokens > 0 and seconds > 0:
            old, new = known.device.prefill_s, seconds / tokens
            known.device.prefill_s = old + PREFILL_WEIGHT * (new - old) if old else new

    def prefill_tok_per_s(self, worker: str) -> float:
        """Prefill speed in tokens per second; 0: not known."""
        known = self._workers.get(worker)
        return 1 / known.device.prefill_s if known is not None and known.device.prefill_s else 0.0
