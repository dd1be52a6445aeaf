"""Fits step times to measured points, and reports the error on held-out points. Pure.

The time of a step is a line over the batch size (step_time.py). The reported errors are found by leaving out one point
at a time and predicting it from a fit of the others. The smallest and the largest batch are left out as well, which
makes this a hard test. An engine that slows down at large batches gets a second, steeper line, which starts at a
measured batch, if the first line alone is far off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from windfall.step_time import StepPoint, StepTime, fit

FLAT = 1e-4
"""Minimum time that a response adds to a step, as a share of the fixed time."""
BEND_POINTS = 3
"""Minimum number of points on the first line."""
BEND_GAIN = 0.5
"""A bend is used only if it removes at least half of the error."""


def line_or_bend(points: Sequence[StepPoint]) -> StepTime:
    """Fit one line, or two: the first up to a bend (`over_batch`), the second from there on.

    >>> flat = [StepPoint(b, 0.01 + 0.0001 * b) for b in (1, 16, 64, 256)]
    >>> slows = line_or_bend([*flat, StepPoint(512, 0.2)])
    >>> line_or_bend(flat).over_s, slows.over_batch, round(slows.step_s(512), 9)
    (0.0, 256, 0.2)
    """
    best = fit(points, FLAT)
    if len(points) > BEND_POINTS:
        bends = [_bend(points, n) for n in range(BEND_POINTS - 1, len(points) - 1)]
        steeper = min(bends, key=lambda bend: _error(bend, points))
        if steeper.over_s > 0 and _error(steeper, points) < BEND_GAIN * _error(best, points):
            return steeper
    return best


def _bend(points: Sequence[StepPoint], at: int) -> StepTime:
    first, corner = fit(points[: at + 1], FLAT), points[at].batch
    above = [(p.batch - corner, p.step_s - first.step_s(p.batch), p.weight / p.step_s**2) for p in points[at + 1 :]]
    slope = sum(w * x * y for x, y, w in above) / sum(w * x * x for x, _, w in above)
    return replace(first, over_batch=corner, over_s=max(0.0, slope))


def _error(time: StepTime, points: Sequence[StepPoint]) -> float:
    """The weighted mean relative error."""
    return sum(p.weight * abs(time.step_s(p.batch) / p.step_s - 1) for p in points) / sum(p.weight for p in points)


def held_out_errors(
    points: Sequence[StepPoint], fit_points: Callable[[Sequence[StepPoint]], StepTime] = partial(fit, min_ratio=FLAT)
) -> str:
    """A note with the relative error at each point when it is predicted from the others.

    >>> held_out_errors([StepPoint(1, 0.011), StepPoint(10, 0.02), StepPoint(100, 0.12)])
    'step times, each left out in turn: batch 1 -9%, batch 10 +5%, batch 100 -8%; mean 7.3%'
    """
    if len(points) < 3:
        return "held out: nothing, because there are fewer than three batch sizes"
    fits = [fit_points([*points[:n], *points[n + 1 :]]) for n in range(len(points))]
    errors = [f.step_s(p.batch) / p.step_s - 1 for f, p in zip(fits, points, strict=True)]
    each = ", ".join(f"batch {p.batch:.3g} {error:+.0%}" for p, error in zip(points, errors, strict=True))
    return f"step times, each left out in turn: {each}; mean {statistics.mean(map(abs, errors)):.1%}"
