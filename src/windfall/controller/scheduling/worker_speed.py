"""The speed of each worker at every batch size, learned from the tokens that arrive. Pure: the caller measures time.

An engine step takes `fixed_s` (reading the weights) plus `each_s` for every response in the batch, and generates one
token of each response. These two numbers are a complete profile: throughput grows with the batch, ever more slowly, and
can be predicted for batch sizes that were never seen.

Rules:
- Tokens count for the batch size at which they were generated; sizes within half an octave count as one size.
- A worker is assumed to become slower or faster at all batch sizes alike: a measurement at one size changes all sizes.
  So a change is accepted after three windows, and what was learned about the other sizes is kept.
- One outlier has little effect: its deviation is limited to a factor of four and has a weight of a tenth.
- Unseen batch sizes are predicted from workers of the same device, or else from all, scaled to the worker's own speed.
- Where the context of the responses is reported, workers of one device share a profile (device_profile.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from windfall.controller.scheduling.device_profile import DeviceProfiles, Window, streak
from windfall.controller.scheduling.least_squares import LineSums
from windfall.types import LOCAL

WINDOW_FRAMES, WINDOW_MIN_S, WINDOW_MAX_S = 8, 0.1, 2.0
"""A window has 8 frames and at least 0.1 s, or all frames of 2 s; shorter windows are mostly noise."""
PREFILL_WEIGHT = 0.3
"""Weight of the newest prefill in the average."""
GAIN, FAST_GAIN = 0.1, 0.5
"""Weight of a new window: GAIN normally, FAST_GAIN from the third deviating window in a row."""
DEVIATION, MAX_DEVIATION = math.log(1.2), math.log(4)
"""A window deviates if its log ratio exceeds DEVIATION. Values above MAX_DEVIATION are clipped."""
ENOUGH_WINDOWS = 8
"""Number of windows after which a batch size is well known; further windows do not raise its weight."""
MIN_RATIO = 1 / 4096
"""Minimum of each_s / fixed_s, so that no response is free."""
KNEE = 0.8
"""Share of the highest throughput that defines the knee."""
PRIOR_WEIGHT = 0.25
"""Weight of the prior, in windows, at a batch of one and at four times the largest batch seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Step time and throughput by batch size.

    >>> engine = Profile(fixed_s=0.002, each_s=0.00001)
    >>> round(engine.tok_per_s(100)), round(engine.tok_per_s(800)), engine.knee
    (33333, 80000, 800)
    """

    fixed_s: float
    """Seconds of a step with an empty batch."""
    each_s: float
    """Seconds that a response with the usual context adds to a step."""
    context_s: float = 0.0
    """The part of `each_s` that is due to each token in the context of a response, in seconds."""
    context: float = 0.0
    """The usual context of a response, in tokens."""

    def step_s(self, batch: float) -> float:
        """Seconds between two tokens of a response."""
        return self.fixed_s + self.each_s * batch

    def tok_per_s(self, batch: float) -> float:
        return batch / self.step_s(batch) if batch > 0 else 0.0

    @property
    def knee(self) -> int:
        """The batch size with 0.8 of the highest throughput of any batch; twice this size gives a ninth more."""
        return max(1, round(KNEE / (1 - KNEE) * self.fixed_s / self.each_s))

    def times(self, factor: float) -> Profile:
        """The profile of a worker that is slower by this factor."""
        return Profile(fixed_s=self.fixed_s * factor, each_s=self.each_s * factor)


UNKNOWN = Profile(fixed_s=1.0, each_s=1 / 32)
"""The profile assumed before any measurement. Only the ratio of the two numbers has a meaning."""


@dataclass(slots=True)
class _Size:
    """Measurements at one batch size."""

    batch: float
    log_step_s: float
    windows: int = 1
    streak: int = 0
    """Windows in a row that deviated by more than DEVIATION; negative: faster than expected."""

    def gain(self, deviation: float) -> float:
        self.streak = streak(self.streak, deviation, DEVIATION)
        return FAST_GAIN if abs(self.streak) >= 3 else max(GAIN, 1 / (self.windows + 1))


@dataclass(slots=True)
class _Window(Window):
    size: int = 0
    """Half-octave of the batch size."""
    frames: int = 0


@dataclass(slots=True)
class _Worker:
    device: str
    sizes: dict[int, _Size] = field(default_factory=dict)
    window: _Window | None = None
    fitted: Profile | None = None
    """The fitted profile; None if there are newer measurements."""

    def profile(self, prior: Profile) -> Profile:
        """The profile of a worker with at least one measurement."""
        if self.fitted is None:
            self.fitted = _fit(self.sizes.values(), prior)
        return self.fitted

    def learn(self, size: int, batch: float, step_s: float, prior: Profile) -> None:
        log_s, known = math.log(step_s), self.sizes.get(size)
        if known is None:
            if self.sizes:
                expected = math.log(self.profile(prior).step_s(batch))
                log_s = expected + _clip(log_s - expected)
            self.sizes[size] = _Size(batch, log_s)
        else:
            deviation = _clip(log_s - known.log_step_s)
            gain = known.gain(deviation)
            # With few windows, the first ones may have been outliers: then the other sizes do not change.
            for other in self.sizes.values() if known.windows >= ENOUGH_WINDOWS else (known,):
                other.log_step_s += deviation * gain
            known.batch += (batch - known.batch) * gain
            known.windows += 1
        self.fitted = None


class WorkerSpeeds:
    """The profiles of all workers."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._typical: dict[str | None, Profile] = {}
        """Median profile by device; None: of all devices. It is kept when the last worker of a device is gone."""
        self._new_windows = 0
        self._devices = DeviceProfiles()
        self._last: tuple[tuple[float, float, float], Profile] | None = None
        """The last coefficients of a device and their profile: most workers of a large fleet share them."""
        self._prefill_s: dict[str, float] = {}
        """Seconds to prefill one token, by device."""

    def join(self, worker: str, device: str) -> None:
        self._workers[worker] = _Worker(device)
        local = worker.partition("#")[0] == LOCAL  # the trainer may have several engines
        self._devices.join(worker, f"{device} of the trainer" if local else device)

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._devices.forget(worker)

    def observe(self, worker: str, batch: int, tokens: int, seconds: float, context: float = 0.0) -> None:
        """The worker had `batch` responses for `seconds` and generated `tokens`. `context`: tokens in the context of
        all of them; 0: not known. Time without work must not be included."""
        if batch <= 0 or tokens < 0 or not 0 <= seconds < math.inf:
            return
        known = self._workers.setdefault(worker, _Worker(""))
        size = (batch * batch).bit_length()  # half-octaves
        window = known.window
        if window is None or window.size != size:
            self._close(worker, known)
            window = known.window = _Window(size=size)
        window.frames += 1
        window.tokens += tokens
        window.seconds += seconds
        window.batch_seconds += seconds * batch
        window.context_seconds += seconds * context
        if window.seconds >= WINDOW_MIN_S and (window.frames >= WINDOW_FRAMES or window.seconds >= WINDOW_MAX_S):
            self._close(worker, known)

    def _close(self, worker: str, known: _Worker) -> None:
        window = known.window
        if window is None or not window.tokens or not window.seconds:
            return  # no tokens yet: the time counts for the next window, unless the batch changes
        known.window = None
        self._devices.observe(worker, window)
        known.learn(window.size, window.batch, window.step_s, self._prior(known))
        self._new_windows += 1
        if known.device not in self._typical or self._new_windows >= max(ENOUGH_WINDOWS, len(self._workers)):
            self._new_windows = 0
            self._compare()

    def _prior(self, known: _Worker) -> Profile:
        return self._typical.get(known.device) or self._typical.get(None) or UNKNOWN

    def _compare(self) -> None:
        """Computes the median profile of every device and of all devices."""
        by_device: dict[str, list[Profile]] = {}
        for known in self._workers.values():
            if known.sizes:
                by_device.setdefault(known.device, []).append(known.profile(self._prior(known)))
        for device, profiles in by_device.items():
            self._typical[device] = _median(profiles)
        self._typical[None] = _median([p for profiles in by_device.values() for p in profiles])

    def profile(self, worker: str) -> Profile | None:
        """None: no worker has been measured yet."""
        if (found := self._devices.coefficients(worker)) is not None:
            if self._last is None or self._last[0] is not found:
                fixed_s, each_s, context_s = found
                made = Profile(fixed_s=fixed_s, each_s=each_s, context_s=context_s, context=self._devices.context)
                self._last = (found, made)
            return self._last[1]
        known = self._workers.get(worker)
        if known is None:
            return self._typical.get(None)
        if known.sizes:
            return known.profile(self._prior(known))
        return self._typical.get(known.device) or self._typical.get(None)

    def measured(self, worker: str) -> dict[int, tuple[float, float, int]]:
        """(batch, step time in seconds, number of windows) by half-octave of the batch size."""
        known = self._workers.get(worker)
        sizes = known.sizes if known is not None else {}
        return {n: (s.batch, math.exp(s.log_step_s), s.windows) for n, s in sizes.items()}

    def tok_per_s(self, worker: str, batch: int) -> float:
        """0: no worker has been measured yet."""
        profile = self.profile(worker)
        return profile.tok_per_s(batch) if profile is not None else 0.0

    def prefilled(self, worker: str, tokens: int, seconds: float) -> None:
        """The worker prefilled `tokens` in `seconds`, not counting its decode steps."""
        known = self._workers.get(worker)
        if known is not None and tokens > 0 and seconds > 0:
            old, new = self._prefill_s.get(known.device), seconds / tokens
            self._prefill_s[known.device] = new if old is None else old + PREFILL_WEIGHT * (new - old)

    def prefill_tok_per_s(self, worker: str) -> float:
        """Prefill speed in tokens per second; 0: not known."""
        known = self._workers.get(worker)
        prefill_s = self._prefill_s.get(known.device) if known is not None else None
        return 1 / prefill_s if prefill_s else 0.0


def _fit(sizes: Iterable[_Size], prior: Profile) -> Profile:
    """Fits step time over batch size, in relative error. Far from measurements, it follows the scaled `prior`."""
    points = [(s.batch, math.exp(s.log_step_s), float(min(s.windows, ENOUGH_WINDOWS))) for s in sizes]
    weight = sum(w for _, _, w in points)
    slowdown = math.exp(sum(w * math.log(y / prior.step_s(x)) for x, y, w in points) / weight)
    far = 4 * max(x for x, _, _ in points)
    scaled = prior.times(slowdown)
    points += [(1.0, scaled.step_s(1.0), PRIOR_WEIGHT), (far, scaled.step_s(far), PRIOR_WEIGHT)]
    sums = LineSums.relative(points)
    fixed, each = sums.line() or (sums.constant(), 0.0)
    if fixed <= 0:
        each = sums.slope()
        fixed = each * MIN_RATIO
    elif each < fixed * MIN_RATIO:
        fixed = sums.proportional(MIN_RATIO)
        each = fixed * MIN_RATIO
    return Profile(fixed_s=fixed, each_s=each)


def _median(profiles: list[Profile]) -> Profile:
    at = len(profiles) // 2
    return Profile(fixed_s=sorted(p.fixed_s for p in profiles)[at], each_s=sorted(p.each_s for p in profiles)[at])


def _clip(deviation: float) -> float:
    return max(-MAX_DEVIATION, min(MAX_DEVIATION, deviation))
