"""What workers of one device have in common, learned from all of them together, and how much each one is slower. Pure.

    step = level * (fixed + each * batch + behind * (tokens behind all of the batch))

Seen over the batch alone, a worker whose responses happen to be long looks slow and one that has just begun looks
fast: reading the cache takes time, too. So the three figures are fitted to what every worker of a device showed, in
relative error, the old slowly forgotten, none below 0. A worker has one figure of its own, its level, and workers
within EQUAL of what is usual count as equal: else noise would give one of two equal workers twice as much as the other.
A change of level is believed after three windows. Nothing is said of workers whose context is not told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

KEEP = 0.999
"""Of what was seen, with every window that comes."""
ENOUGH = 16
"""Windows before anything is said of a device."""
EVERY = 4
"""Windows between two fits, at least."""
EQUAL = math.log(1.15)
GAIN, QUICK = 0.05, 0.5
OFF, ODD = math.log(1.3), math.log(4)
SMALL = 1 / 4096
TOLD = 2
"""Tokens of every response that make a window: fewer are mostly noise."""


@dataclass(slots=True)
class _Device:
    squares: np.ndarray = field(default_factory=lambda: np.zeros((4, 4)))
    """Sums of products of (1, batch, context, step) over the step's time."""
    windows: int = 0
    fit: tuple[float, float, float] = (0.0, 0.0, 0.0)
    level: float = 0.0
    """What is usual, of its workers."""
    due: int = 0
    """Windows until these two are looked at again: many workers change them little each."""

    def add(self, batch: float, context: float, step_s: float, expected_s: float) -> None:
        row = np.array([1.0, batch, context, step_s]) / expected_s
        self.squares = KEEP * self.squares + np.outer(row, row)
        self.windows += 1
        self.due -= 1


def streak(before: int, off: float, bound: float) -> int:
    """So many windows in a row were off by more than the bound, this one counted; below 0: faster than expected.

    >>> streak(2, 0.5, 0.2), streak(2, 0.1, 0.2), streak(2, -0.5, 0.2)
    (3, 0, -1)
    """
    side = (off > bound) - (off < -bound)
    return side * (1 + abs(before)) if side * before >= 0 else side


@dataclass(slots=True)
class _Worker:
    device: str
    level: float = 0.0
    """The logarithm."""
    windows: int = 0
    streak: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    """Seconds times batch."""
    behind: float = 0.0
    """Seconds times context."""

    def learn(self, off: float) -> None:
        off -= self.level
        self.streak = streak(self.streak, off, OFF)
        self.windows += 1
        self.level += off * (QUICK if abs(self.streak) >= 3 else max(GAIN, 1 / (self.windows + ENOUGH)))


class Shapes:
    def __init__(self) -> None:
        self._devices: dict[str, _Device] = {}
        self._workers: dict[str, _Worker] = {}
        self.context, self._windows = 0.0, 0
        """Tokens behind one response, on average."""

    def join(self, worker: str, device: str) -> None:
        self._workers[worker] = _Worker(device)

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def observe(self, worker: str, tokens: float, seconds: float, waited: float, behind: float) -> None:
        """What it made in some time; `waited` and `behind`: seconds times batch, and times the tokens behind it."""
        known = self._workers.get(worker)
        if known is None or behind <= 0:
            return
        known.tokens, known.seconds = known.tokens + tokens, known.seconds + seconds
        known.waited, known.behind = known.waited + waited, known.behind + behind
        batch, context = known.waited / known.seconds, known.behind / known.seconds
        if known.tokens >= TOLD * batch:
            self._learn(known, batch, context, known.waited / known.tokens)
            known.tokens = known.seconds = known.waited = known.behind = 0.0

    def _learn(self, known: _Worker, batch: float, context: float, step_s: float) -> None:
        device, expected_s = self._devices.setdefault(known.device, _Device()), step_s
        if device.windows >= ENOUGH:
            if device.due <= 0:
                self._look(known.device, device)
            fixed, each, behind = device.fit
            expected_s = fixed + each * batch + behind * context
            off = max(-ODD, min(ODD, math.log(step_s / expected_s)))
            known.learn(off)
            # Levels are beside each other, not beside the shape: else both could drift away together.
            step_s = expected_s * math.exp(off - known.level + device.level)
        device.add(batch, context, step_s, expected_s)
        self._windows += 1
        self.context += (context / batch - self.context) / min(self._windows, 1000)

    def _look(self, name: str, device: _Device) -> None:
        levels = sorted(w.level for w in self._workers.values() if w.device == name and w.windows)
        device.fit = _least_squares(device.squares)
        device.level = levels[len(levels) // 2] if levels else 0.0
        device.due = max(EVERY, len(levels))

    def line(self, worker: str) -> tuple[float, float, float] | None:
        """(fixed_s, each_s, context_s) of a worker: `each_s` with the usual context, of which every token adds
        `context_s`. None: not enough is known."""
        known = self._workers.get(worker)
        device = self._devices.get(known.device) if known is not None else None
        if known is None or device is None or not any(device.fit):
            return None
        fixed, each, behind = device.fit
        level = math.exp(known.level) if abs(known.level) > EQUAL else 1.0
        each += behind * self.context
        fixed = max(fixed, each * SMALL)
        return level * fixed, level * max(each, fixed * SMALL), level * behind


def _least_squares(squares: np.ndarray) -> tuple[float, float, float]:
    """The best fit with no figure below 0: of every choice of figures that are not 0."""
    best, found = math.inf, (0.0, 0.0, 0.0)
    for mask in range(1, 8):
        columns = [n for n in range(3) if mask >> n & 1]
        a, b = squares[np.ix_(columns, columns)], squares[columns, 3]
        scale = np.sqrt(np.diag(a))
        x = np.linalg.lstsq(a / np.outer(scale, scale), b / scale, rcond=1e-10)[0] / scale
        left = float(squares[3, 3] - 2 * x @ b + x @ a @ x)
        if (x >= 0).all() and left < best:
            whole = np.zeros(3)
            whole[columns] = x
            best, found = left, (float(whole[0]), float(whole[1]), float(whole[2]))
    return found
