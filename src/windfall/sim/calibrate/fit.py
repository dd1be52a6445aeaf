"""Fits service times to measured points, and reports the error on held-out points. Pure.

The time of a step is a line over the batch size, fitted in relative error, with neither coefficient below 0. The
reported error leaves one point out, fits the others, and predicts it. The smallest and the largest batch are left out
in turn as well, which makes this a hard test. An engine that slows down at large batches gets a second, steeper line
that starts at one of the measured batches, if the first line alone is far off.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from windfall.errors import WindfallError, nearest
from windfall.scheduling.least_squares import LineSums
from windfall.sim.core.service import Service

FLAT = 1e-4
"""Smallest time that a response adds to a step, as a share of the fixed time."""
BEND_POINTS = 3
"""Fewest points on the first line."""
BEND_GAIN = 0.5
"""A bend is used only if it removes at least half of the error."""


class StepTime(NamedTuple):
    batch: float
    step_s: float
    weight: float = 1.0


def line(points: Sequence[StepTime]) -> tuple[float, float]:
    """Fit (fixed_s, each_s) by weighted least squares.

    >>> fixed, each = line([StepTime(1, 0.011), StepTime(10, 0.02), StepTime(100, 0.11)])
    >>> round(fixed, 6), round(each, 6)
    (0.01, 0.001)
    """
    sums = LineSums.relative(points)
    fixed, each = sums.line() or (sums.constant(), 0.0)  # with one batch size only, nothing is known of others
    if fixed <= 0:
        return FLAT * sums.slope(), sums.slope()
    return (sums.constant(), FLAT * sums.constant()) if each <= 0 else (fixed, each)


class Bend(NamedTuple):
    """A line over the batch size, with a steeper part above `over_batch`."""

    fixed_s: float
    each_s: float
    over_batch: float = 0.0
    over_s: float = 0.0
    """Extra seconds for every response above `over_batch`."""

    def step_s(self, batch: float) -> float:
        return self.fixed_s + self.each_s * batch + self.over_s * max(0.0, batch - self.over_batch)


def bent(points: Sequence[StepTime]) -> Bend:
    """Fit one line, or two: the first up to a bend, the second from there on.

    >>> flat = [StepTime(b, 0.01 + 0.0001 * b) for b in (1, 16, 64, 256)]
    >>> slows = bent([*flat, StepTime(512, 0.2)])
    >>> bent(flat).over_s, slows.over_batch, round(slows.step_s(512), 9)
    (0.0, 256, 0.2)
    """
    best = Bend(*line(points))
    if len(points) > BEND_POINTS:
        bends = [_bend(points, n) for n in range(BEND_POINTS - 1, len(points) - 1)]
        steeper = min(bends, key=lambda bend: _error(bend, points))
        if steeper.over_s > 0 and _error(steeper, points) < BEND_GAIN * _error(best, points):
            return steeper
    return best


def _bend(points: Sequence[StepTime], at: int) -> Bend:
    first, corner = Bend(*line(points[: at + 1])), points[at].batch
    above = [(p.batch - corner, p.step_s - first.step_s(p.batch), p.weight / p.step_s**2) for p in points[at + 1 :]]
    slope = sum(w * x * y for x, y, w in above) / sum(w * x * x for x, _, w in above)
    return first._replace(over_batch=corner, over_s=max(0.0, slope))


def _error(bend: Bend, points: Sequence[StepTime]) -> float:
    """The weighted mean relative error."""
    return sum(p.weight * abs(bend.step_s(p.batch) / p.step_s - 1) for p in points) / sum(p.weight for p in points)


def straight(points: Sequence[StepTime]) -> Bend:
    return Bend(*line(points))


Form = Callable[[Sequence[StepTime]], Bend]


def held_out(points: Sequence[StepTime], form: Form = straight) -> list[tuple[StepTime, float]]:
    """The relative error at each point when it is predicted from the others. Empty for fewer than three points.

    >>> [round(abs(off), 3) for _, off in held_out([StepTime(1, 0.011), StepTime(10, 0.02), StepTime(100, 0.11)])]
    [0.0, 0.0, 0.0]
    """
    out = []
    for n, point in enumerate(points if len(points) > 2 else ()):
        others = form([*points[:n], *points[n + 1 :]])
        out.append((point, others.step_s(point.batch) / point.step_s - 1))
    return out


def errors(points: Sequence[StepTime], form: Form = straight) -> list[str]:
    """The held-out errors as notes."""
    results = held_out(points, form)
    if not results:
        return ["held out: nothing, because there are fewer than three batch sizes"]
    each = ", ".join(f"batch {p.batch:.3g} {off:+.0%}" for p, off in results)
    return [f"step times, each left out in turn: {each}; mean {statistics.mean(abs(o) for _, o in results):.1%}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    """Published figures of one GPU."""

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
"""From the manufacturers' data sheets (SXM where there is a choice)."""
MEMORY_BOUND = ("fixed_s", "context_s")
COMPUTE_BOUND = ("prefill_s", "train_s")
SLACK = 1.25
"""Uncertainty factor in either direction: GPUs reach different shares of their peaks."""


def scaled(service: Service, source: str, target: str) -> tuple[Service, Service, Service]:
    """Estimate the same work on another GPU: lower bound, estimate, upper bound. Steps scale with memory bandwidth,
    prefill and training with FLOP/s. The time that a response adds to a step, and an update, may be bound by either."""
    for name in (source, target):
        if name not in SPECS:
            raise WindfallError(f"no published figures for GPU {name!r}", where="--gpu, --to", fix=nearest(name, SPECS))
    a, b = SPECS[source], SPECS[target]
    memory, compute = a.bytes_per_s / b.bytes_per_s, a.flop_per_s / b.flop_per_s
    low, middle, high = {}, {}, {}
    for field in fields(service):
        bounds = (memory,) if field.name in MEMORY_BOUND else (compute,) if field.name in COMPUTE_BOUND else (
            memory, compute)  # fmt: skip
        if not field.name.endswith("_s"):
            continue
        value = getattr(service, field.name)
        low[field.name], high[field.name] = value * min(bounds) / SLACK, value * max(bounds) * SLACK
        middle[field.name] = value * math.prod(bounds) ** (1 / len(bounds))
    return replace(service, **low), replace(service, **middle), replace(service, **high)
