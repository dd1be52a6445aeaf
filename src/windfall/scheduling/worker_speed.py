"""How fast each worker is at every batch size, learned from what arrives. Pure: the caller measures the time.

A step of an engine takes `fixed_s` (reading the weights) and `each_s` more for every response in the batch, and gives
each of them a token. Two numbers are a whole profile: throughput that grows with the batch, ever more slowly, and says
something about batches that were never seen.

Rules:
- what a worker made counts at the batch it was made at; sizes within a half-octave are one size;
- a worker that becomes slower or faster does so at every batch: news about one size moves all of them alike, so a
  change is believed after three windows, and what was learned about the shape is kept;
- one odd window moves little: it counts as four times off at most, and for a tenth;
- what a worker has not shown comes from workers of the same device, else from all, scaled to what it has shown;
- where it is told what responses have behind them, workers of a device share a profile, each with a level (shape.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from windfall.scheduling.device_profile import Shapes, streak
from windfall.types import LOCAL

FRAMES, SHORT_S, LONG_S = 8, 0.1, 2.0
"""So many frames in no less than SHORT_S, or as many as come in LONG_S, make a window: less is mostly noise."""
PREFILL = 0.3
"""How much of the newest prefill is believed."""
GAIN, QUICK = 0.1, 0.5
"""How much of the newest window is believed: little, and much of the third in a row that is off to the same side."""
OFF, ODD = math.log(1.2), math.log(4)
SURE = 8
"""Windows after which a size of batch is known as well as it will be."""
SMALL = 1 / 4096
"""The least that a response adds to a step, as a share of `fixed_s`; so that no batch is free."""
NEARLY = 0.8
DOUBT = 0.25
"""What the prior weighs, in windows, at a batch of one and at four times the largest seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Throughput over batch.

    >>> engine = Profile(fixed_s=0.002, each_s=0.00001)
    >>> round(engine.tok_per_s(100)), round(engine.tok_per_s(800)), engine.knee
    (33333, 80000, 800)
    """

    fixed_s: float
    each_s: float
    """At the usual context."""
    context_s: float = 0.0
    """Of this, what every token behind a response adds."""
    context: float = 0.0
    """The usual one: tokens behind a response."""

    def step_s(self, batch: float) -> float:
        """How long a response waits for its next token."""
        return self.fixed_s + self.each_s * batch

    def tok_per_s(self, batch: float) -> float:
        return batch / self.step_s(batch) if batch > 0 else 0.0

    @property
    def knee(self) -> int:
        """The batch that gives 0.8 of all that any batch would: twice as many give a ninth more."""
        return max(1, round(NEARLY / (1 - NEARLY) * self.fixed_s / self.each_s))

    def times(self, factor: float) -> Profile:
        return Profile(fixed_s=self.fixed_s * factor, each_s=self.each_s * factor)


UNKNOWN = Profile(fixed_s=1.0, each_s=1 / 32)
"""The shape that is believed before anything was seen; its scale means nothing."""


@dataclass(slots=True)
class _Size:
    batch: float
    log_step_s: float
    windows: int = 1
    streak: int = 0
    """So many windows in a row were off by more than OFF; below 0: faster than expected."""

    def gain(self, off: float) -> float:
        self.streak = streak(self.streak, off, OFF)
        return QUICK if abs(self.streak) >= 3 else max(GAIN, 1 / (self.windows + 1))


@dataclass(slots=True)
class _Window:
    size: int
    frames: int = 0
    tokens: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds times batch: divided by the tokens, the time per token of one response."""
    behind: float = 0.0
    """Seconds times the tokens behind the batch."""


@dataclass(slots=True)
class _Worker:
    device: str
    sizes: dict[int, _Size] = field(default_factory=dict)
    window: _Window | None = None
    fitted: Profile | None = None
    """None: something was learned since."""

    def profile(self, prior: Profile) -> Profile:
        """Only of one that has shown something."""
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
            off = _clip(log_s - known.log_step_s)
            gain = known.gain(off)
            sure = known.windows >= SURE  # else it may be the first windows that were odd
            for other in self.sizes.values() if sure else (known,):
                other.log_step_s += off * gain
            known.batch += (batch - known.batch) * gain
            known.windows += 1
        self.fitted = None


class Speeds:
    """The profiles of all workers. Tell it who joins, what each one makes, and who is gone."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._typical: dict[str | None, Profile] = {}
        """By device; None: of all. Kept when the last worker of a device is gone."""
        self._news = 0
        self._shapes = Shapes()
        self._prefill_s: dict[str, float] = {}
        """Of a token, by device."""

    def join(self, worker: str, device: str) -> None:
        self._workers[worker] = _Worker(device)
        local = worker.partition("#")[0] == LOCAL  # several engines in one, it may be
        self._shapes.join(worker, f"{device} of the trainer" if local else device)

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._shapes.forget(worker)

    def observe(self, worker: str, batch: int, tokens: int, seconds: float, context: float = 0.0) -> None:
        """In the last `seconds` the worker held `batch` responses and made `tokens`; `context`: tokens behind all of
        them, 0: not known. Not for time without work."""
        if batch <= 0 or tokens < 0 or not 0 <= seconds < math.inf:
            return
        known = self._workers.setdefault(worker, _Worker(""))
        size = (batch * batch).bit_length()  # half-octaves
        window = known.window
        if window is None or window.size != size:
            self._close(worker, known)
            window = known.window = _Window(size)
        window.frames += 1
        window.tokens += tokens
        window.seconds += seconds
        window.waited += seconds * batch
        window.behind += seconds * context
        if window.seconds >= SHORT_S and (window.frames >= FRAMES or window.seconds >= LONG_S):
            self._close(worker, known)

    def _close(self, worker: str, known: _Worker) -> None:
        window = known.window
        if window is None or not window.tokens or not window.seconds:
            return  # nothing came yet: the time goes on to count, unless the batch changes
        known.window = None
        batch, step_s = window.waited / window.seconds, window.waited / window.tokens
        self._shapes.observe(worker, window.tokens, window.seconds, window.waited, window.behind)
        known.learn(window.size, batch, step_s, self._prior(known))
        self._news += 1
        if known.device not in self._typical or self._news >= max(SURE, len(self._workers)):
            self._news = 0
            self._compare()

    def _prior(self, known: _Worker) -> Profile:
        return self._typical.get(known.device) or self._typical.get(None) or UNKNOWN

    def _compare(self) -> None:
        """What is typical: of every device, and of all."""
        by_device: dict[str, list[Profile]] = {}
        for known in self._workers.values():
            if known.sizes:
                by_device.setdefault(known.device, []).append(known.profile(self._prior(known)))
        for device, profiles in by_device.items():
            self._typical[device] = _median(profiles)
        self._typical[None] = _median([p for profiles in by_device.values() for p in profiles])

    def profile(self, worker: str) -> Profile | None:
        """None: nobody has made anything yet."""
        if (line := self._shapes.line(worker)) is not None:
            return Profile(fixed_s=line[0], each_s=line[1], context_s=line[2], context=self._shapes.context)
        known = self._workers.get(worker)
        if known is None:
            return self._typical.get(None)
        if known.sizes:
            return known.profile(self._prior(known))
        return self._typical.get(known.device) or self._typical.get(None)

    def seen(self, worker: str) -> dict[int, tuple[float, float, int]]:
        """By size of batch: the batch, the time of a step, and how many windows say so."""
        known = self._workers.get(worker)
        sizes = known.sizes if known is not None else {}
        return {n: (s.batch, math.exp(s.log_step_s), s.windows) for n, s in sizes.items()}

    def tok_per_s(self, worker: str, batch: int) -> float:
        """0: nobody has made anything yet."""
        profile = self.profile(worker)
        return profile.tok_per_s(batch) if profile is not None else 0.0

    def prefilled(self, worker: str, tokens: int, seconds: float) -> None:
        """It has computed so many tokens again, in so much time beside its steps."""
        known = self._workers.get(worker)
        if known is not None and tokens > 0 and seconds > 0:
            old, new = self._prefill_s.get(known.device), seconds / tokens
            self._prefill_s[known.device] = new if old is None else old + PREFILL * (new - old)

    def prefill_tok_per_s(self, worker: str) -> float:
        """0: not known."""
        known = self._workers.get(worker)
        prefill_s = self._prefill_s.get(known.device) if known is not None else None
        return 1 / prefill_s if prefill_s else 0.0

    def knee(self, worker: str) -> int:
        return (self.profile(worker) or UNKNOWN).knee


def _fit(sizes: Iterable[_Size], prior: Profile) -> Profile:
    """The line of step time over batch through what was seen, in relative error, held where nothing was by `prior`
    scaled to it."""
    points = [(s.batch, math.exp(s.log_step_s), float(min(s.windows, SURE))) for s in sizes]
    weight = sum(w for _, _, w in points)
    level = math.exp(sum(w * math.log(y / prior.step_s(x)) for x, y, w in points) / weight)
    far = 4 * max(x for x, _, _ in points)
    scaled = prior.times(level)
    points += [(1.0, scaled.step_s(1.0), DOUBT), (far, scaled.step_s(far), DOUBT)]
    w_ = wx = wxx = wy = wxy = 0.0
    for x, y, w in points:
        w /= y * y
        w_, wx, wxx, wy, wxy = w_ + w, wx + w * x, wxx + w * x * x, wy + w * y, wxy + w * x * y
    det = w_ * wxx - wx * wx
    fixed, each = (wy * wxx - wx * wxy) / det, (w_ * wxy - wx * wy) / det
    if fixed <= 0:  # a batch of none takes no time: the best line through the origin
        fixed = each = wxy / wxx
        fixed *= SMALL
    elif each < fixed * SMALL:
        fixed = (wy + SMALL * wxy) / (w_ + 2 * SMALL * wx + SMALL * SMALL * wxx)
        each = fixed * SMALL
    return Profile(fixed_s=fixed, each_s=each)


def _median(profiles: list[Profile]) -> Profile:
    at = len(profiles) // 2
    return Profile(fixed_s=sorted(p.fixed_s for p in profiles)[at], each_s=sorted(p.each_s for p in profiles)[at])


def _clip(off: float) -> float:
    return max(-ODD, min(ODD, off))
