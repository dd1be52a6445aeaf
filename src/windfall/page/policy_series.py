"""What one policy of a run did, step by step, for the charts of the page. Pure, and bounded in memory.

There are at most 2 * MAX_POINTS points; when there are more, two neighbors become one (`stride` steps per point). A
resume removes the steps that it made void."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

Event = dict[str, Any]

SERIES = (
    "step", "t", "reward", "length", "entropy", "grad_norm", "engine_gap", "staleness_mean", "staleness_max",
    "staleness_bound", "tok_per_s", "trained", "made", "s", "train_s", "train_wait_s", "workers", "workers_lost",
    "moved", "prefilled_again", "cut", "kl", "lr", "drift", "usd",
)  # fmt: skip
"""Columns of the series. `t` is in seconds since the start, `usd` what the policy cost since its last step."""
SUMS = {"trained", "made", "s", "train_s", "train_wait_s", "workers_lost", "moved", "prefilled_again", "usd"}
"""Columns of which a point of several steps has the sum. Of the others it has the mean, of `step` and `t` the last."""
LEARNED = ("reward", "entropy", "grad_norm", "engine_gap", "kl", "drift")
"""Columns that mean nothing in a simulation."""
MAX_POINTS = 2048
MAX_EVALS, MAX_STALENESS = 512, 64
UNCHANGED = 1 << 60
MAX_EXACT = 1 << 53
"""Numbers of this size and more are not exact in a browser, and longer ones cannot be encoded."""


class PolicySeries:
    def __init__(self) -> None:
        self.columns: dict[str, list[float | None]] = {name: [] for name in SERIES}
        self.stride = 1
        """Steps per point."""
        self.step = 0
        """The last step."""
        self.trained = 0
        """Tokens."""
        self.evals: deque[tuple[int, float, float | None, float | None, float | None]] = deque(maxlen=MAX_EVALS)
        """(step, seconds, reward, graded responses, all responses). The log of an older version does not have the
        numbers of responses."""
        self.staleness = [0] * MAX_STALENESS
        self._merging = 0
        """Steps in the last point."""
        self._changed_from = 0
        """First point that may have changed since `changes` was last called; UNCHANGED if nothing has."""

    def add(self, e: Event, seconds: float, usd: float | None, *, simulated: bool) -> None:
        """A step has ended, this many seconds after the start."""
        self.step = e["step"]
        self.trained += int(finite(e.get("trained")) or 0)
        for n, count in enumerate(e.get("staleness_counts") or ()):
            self.staleness[min(n, MAX_STALENESS - 1)] += int(count)
        lengths = [n for row in e.get("lengths") or () for n in row]
        length = sum(lengths) / len(lengths) if lengths else finite(e.get("length"))
        values = {name: finite(e.get(name)) for name in SERIES} | {"t": seconds, "usd": usd, "length": length}
        if simulated:
            values |= dict.fromkeys(LEARNED)
        self._append(values)

    def _append(self, values: dict[str, float | None]) -> None:
        steps = self.columns["step"]
        if steps and self._merging < self.stride:
            weight = self._merging
            self._merging += 1
            for name, column in self.columns.items():
                column[-1] = _merged(name, column[-1], values[name], weight)
        else:
            self._merging = 1
            for name, column in self.columns.items():
                column.append(values[name])
        self._changed_from = min(self._changed_from, len(steps) - 1)
        if len(steps) >= 2 * MAX_POINTS and self._merging == self.stride:  # the last point is complete
            for name, column in self.columns.items():
                pairs = zip(column[::2], column[1::2], strict=True)
                self.columns[name] = [_merged(name, a, b, 1) for a, b in pairs]
            self.stride, self._merging, self._changed_from = 2 * self.stride, 2 * self.stride, 0

    def fall_back(self, step: int) -> None:
        """What came after this step is void."""
        steps, self.step = self.columns["step"], step
        keep = len(steps)
        while keep and (steps[keep - 1] or 0) > step:
            keep -= 1
        for column in self.columns.values():
            del column[keep:]
        self._merging = self.stride
        self._changed_from = min(self._changed_from, keep)
        self.evals = deque((v for v in self.evals if v[0] <= step), maxlen=MAX_EVALS)

    def changes(self) -> dict[str, Any] | None:
        """The points that have changed since the last call."""
        if self._changed_from == UNCHANGED:
            return None
        first, self._changed_from = max(0, min(self._changed_from, len(self.columns["step"]) - 1)), UNCHANGED
        return {"from": first, **{name: column[first:] for name, column in self.columns.items()}}

    def describe(self) -> dict[str, Any]:
        return {
            "step": self.step, "stride": self.stride, "trained": self.trained, "evals": list(self.evals),
            "staleness": _trimmed(self.staleness),
        }  # fmt: skip


def finite(value: Any) -> float | None:
    """The value, if it is a finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if number and abs(value) < MAX_EXACT else None


def _merged(name: str, a: float | None, b: float | None, weight: int) -> float | None:
    """One value for `weight` steps with value `a` and one step with value `b`."""
    if a is None or b is None:
        return a if b is None else b
    if name in ("step", "t"):
        return b
    return a + b if name in SUMS else (a * weight + b) / (weight + 1)


def _trimmed(counts: list[int]) -> list[int]:
    last = max((n for n, count in enumerate(counts) if count), default=-1)
    return counts[: last + 1]
