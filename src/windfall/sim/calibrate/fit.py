"""Fits service times to measured points, and reports the error on held-out points. Pure.

The time of a step is a line over the batch size. The fit minimizes the relative error, with neither coefficient below
0. The reported errors are found by leaving out one point at a time and predicting it from a fit of the others. The
smallest and the largest batch are left out as well, which makes this a hard test. An engine that slows down at large
batches gets a second, steeper line, which starts at a measured batch, if the first line alone is far off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from windfall.controller.scheduling.least_squares import LineSums
from windfall.errors import WindfallError, nearest
from windfall.sim.core.service import Service

FLAT = 1e-4
"""Minimum time that a response adds to a step, as a share of the fixed time."""
BEND_POINTS = 3
"""Minimum number of points on the first line."""
BEND_GAIN = 0.5
"""A bend is used only if it removes at least half of the error."""


class StepTime(NamedTuple):
    batch: float
    step_s: float
    weight: float = 1.0


def line(points: Sequence[StepTime]) -> Service:
    """Fit fixed_s and each_s by weighted least squares.

    >>> fit = line([StepTime(1, 0.011), StepTime(10, 0.02), StepTime(100, 0.11)])
    >>> round(fit.fixed_s, 6), round(fit.each_s, 6)
    (0.01, 0.001)
    """
    sums = LineSums.relative(points)
    fixed_s, each_s = sums.line() or (sums.constant(), 0.0)  # one batch size says nothing about others
    if fixed_s <= 0:
        fixed_s, each_s = FLAT * sums.slope(), sums.slope()
    elif each_s <= 0:
        fixed_s, each_s = sums.constant(), FLAT * sums.constant()
    return Service(fixed_s=fixed_s, each_s=each_s)


def line_or_bend(points: Sequence[StepTime]) -> Service:
    """Fit one line, or two: the first up to a bend (`over_batch`), the second from there on.

    >>> flat = [StepTime(b, 0.01 + 0.0001 * b) for b in (1, 16, 64, 256)]
    >>> slows = line_or_bend([*flat, StepTime(512, 0.2)])
    >>> line_or_bend(flat).over_s, slows.over_batch, round(slows.step_s(512), 9)
    (0.0, 256, 0.2)
    """
    best = line(points)
    if len(points) > BEND_POINTS:
        bends = [_bend(points, n) for n in range(BEND_POINTS - 1, len(points) - 1)]
        steeper = min(bends, key=lambda bend: _error(bend, points))
        if steeper.over_s > 0 and _error(steeper, points) < BEND_GAIN * _error(best, points):
            return steeper
    return best


def _bend(points: Sequence[StepTime], at: int) -> Service:
    first, corner = line(points[: at + 1]), points[at].batch
    above = [(p.batch - corner, p.step_s - first.step_s(p.batch), p.weight / p.step_s**2) for p in points[at + 1 :]]
    slope = sum(w * x * y for x, y, w in above) / sum(w * x * x for x, _, w in above)
    return replace(first, over_batch=corner, over_s=max(0.0, slope))


def _error(fit: Service, points: Sequence[StepTime]) -> float:
    """The weighted mean relative error."""
    return sum(p.weight * abs(fit.step_s(p.batch) / p.step_s - 1) for p in points) / sum(p.weight for p in points)


def held_out_errors(points: Sequence[StepTime], fit: Callable[[Sequence[StepTime]], Service] = line) -> str:
    """A note with the relative error at each point when it is predicted from the others.

    >>> held_out_errors([StepTime(1, 0.011), StepTime(10, 0.02), StepTime(100, 0.12)])
    'step times, each left out in turn: batch 1 -9%, batch 10 +5%, batch 100 -8%; mean 7.3%'
    """
    if len(points) < 3:
        return "held out: nothing, because there are fewer than three batch sizes"
    fits = [fit([*points[:n], *points[n + 1 :]]) for n in range(len(points))]
    errors = [f.step_s(p.batch) / p.step_s - 1 for f, p in zip(fits, points, strict=True)]
    each = ", ".join(f"batch {p.batch:.3g} {error:+.0%}" for p, error in zip(points, errors, strict=True))
    return f"step times, each left out in turn: {each}; mean {statistics.mean(map(abs, errors)):.1%}"


class GpuSpec(NamedTuple):
    """Published figures of one GPU, from the manufacturer's data sheet (SXM where there is a choice)."""

    bytes_per_s: float
    """Memory bandwidth."""
    flop_per_s: float
    """Peak in bfloat16, dense."""


SPECS = {
    "H200": GpuSpec(bytes_per_s=4.8e12, flop_per_s=989e12),
    "H100": GpuSpec(bytes_per_s=3.35e12, flop_per_s=989e12),
    "A100-80GB": GpuSpec(bytes_per_s=2.039e12, flop_per_s=312e12),
    "L40S": GpuSpec(bytes_per_s=0.864e12, flop_per_s=362e12),
    "A10G": GpuSpec(bytes_per_s=0.6e12, flop_per_s=70e12),
    "L4": GpuSpec(bytes_per_s=0.3e12, flop_per_s=121e12),
}
MEMORY_BOUND = ("fixed_s", "context_s")
COMPUTE_BOUND = ("prefill_s", "train_s")
SLACK = 1.25
"""Uncertainty factor in either direction: GPUs reach different shares of their peaks."""


def scaled(service: Service, source: str, target: str) -> tuple[Service, Service, Service]:
    """Estimate the same times on another GPU: lower bound, estimate, upper bound. Steps scale with memory bandwidth,
    prefill and training with FLOP/s. An update, and the time that a response adds to a step, may be bound by either."""
    for name in (source, target):
        if name not in SPECS:
            raise WindfallError(f"no published figures for GPU {name!r}", where="--gpu, --to", fix=nearest(name, SPECS))
    a, b = SPECS[source], SPECS[target]
    memory, compute = a.bytes_per_s / b.bytes_per_s, a.flop_per_s / b.flop_per_s
    low, middle, high = {}, {}, {}
    for name in Service.TIMES:
        ratios = [memory] if name in MEMORY_BOUND else [compute] if name in COMPUTE_BOUND else [memory, compute]
        value = getattr(service, name)
        low[name], high[name] = value * min(ratios) / SLACK, value * max(ratios) * SLACK
        middle[name] = value * math.prod(ratios) ** (1 / len(ratios))
    return replace(service, **low), replace(service, **middle), replace(service, **high)
