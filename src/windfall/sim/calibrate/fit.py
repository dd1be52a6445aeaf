"""From measured points to a Service, and how far off it is on points that it was not fitted to. Pure.

The time of a step is a line over the batch, fitted in relative error, with neither part below 0. The error that is said
is that of leaving one point out, fitting the others, and predicting it; of the smallest and the largest batch, too,
which makes it a hard test. An engine that falls off at large batches gets a second line, steeper, above one of the
batches that were measured: where the first line is far off without it.
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
"""The least that a response adds to a step, as a share of its fixed time."""


BEND_POINTS = 3
"""At least so many on the first line."""
BEND_GAIN = 0.5
"""A bend must take away half of the error, or there is none."""


class StepTime(NamedTuple):
    batch: float
    step_s: float
    weight: float = 1.0


def line(points: Sequence[StepTime]) -> tuple[float, float]:
    """(fixed_s, each_s).

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
    fixed_s: float
    each_s: float
    over_batch: float = 0.0
    over_s: float = 0.0
    """Above `over_batch` every response takes so much more."""

    def step_s(self, batch: float) -> float:
        return self.fixed_s + self.each_s * batch + self.over_s * max(0.0, batch - self.over_batch)


def bent(points: Sequence[StepTime]) -> Bend:
    """A line, or two: the first through the batches up to a bend, the second from there up through the others.

    >>> flat = [StepTime(b, 0.01 + 0.0001 * b) for b in (1, 16, 64, 256)]
    >>> falls = bent([*flat, StepTime(512, 0.2)])
    >>> bent(flat).over_s, falls.over_batch, round(falls.step_s(512), 9)
    (0.0, 256, 0.2)
    """
    best = Bend(*line(points))
    if len(points) > BEND_POINTS:
        bends = [_bend(points, n) for n in range(BEND_POINTS - 1, len(points) - 1)]
        steeper = min(bends, key=lambda bend: _off(bend, points))
        if steeper.over_s > 0 and _off(steeper, points) < BEND_GAIN * _off(best, points):
            return steeper
    return best


def _bend(points: Sequence[StepTime], at: int) -> Bend:
    first, corner = Bend(*line(points[: at + 1])), points[at].batch
    above = [(p.batch - corner, p.step_s - first.step_s(p.batch), p.weight / p.step_s**2) for p in points[at + 1 :]]
    slope = sum(w * x * y for x, y, w in above) / sum(w * x * x for x, _, w in above)
    return first._replace(over_batch=corner, over_s=max(0.0, slope))


def _off(bend: Bend, points: Sequence[StepTime]) -> float:
    """The mean relative error."""
    return sum(p.weight * abs(bend.step_s(p.batch) / p.step_s - 1) for p in points) / sum(p.weight for p in points)


def straight(points: Sequence[StepTime]) -> Bend:
    return Bend(*line(points))


Form = Callable[[Sequence[StepTime]], Bend]


def held_out(points: Sequence[StepTime], form: Form = straight) -> list[tuple[StepTime, float]]:
    """Of every point: what the others predict, as a share of it less 1. Nothing for fewer than three.

    >>> [round(abs(off), 3) for _, off in held_out([StepTime(1, 0.011), Point(10, 0.02), Point(100, 0.11)])]
    [0.0, 0.0, 0.0]
    """
    out = []
    for n, point in enumerate(points if len(points) > 2 else ()):
        others = form([*points[:n], *points[n + 1 :]])
        out.append((point, others.step_s(point.batch) / point.step_s - 1))
    return out


def errors(points: Sequence[StepTime], form: Form = straight) -> list[str]:
    """The same, in words."""
    found = held_out(points, form)
    if not found:
        return ["held out: nothing, fewer than three batches"]
    each = ", ".join(f"batch {p.batch:.3g} {off:+.0%}" for p, off in found)
    return [f"step times, each left out in turn: {each}; mean {statistics.mean(abs(o) for _, o in found):.1%}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """Published figures of one GPU."""

    bytes_per_s: float
    """Of its memory."""
    flop_per_s: float
    """bfloat16, dense."""


SPECS = {
    "H200": Spec(bytes_per_s=4.8e12, flop_per_s=989e12),
    "H100": Spec(bytes_per_s=3.35e12, flop_per_s=989e12),
    "A100-80GB": Spec(bytes_per_s=2.039e12, flop_per_s=312e12),
    "L40S": Spec(bytes_per_s=0.864e12, flop_per_s=362e12),
    "A10G": Spec(bytes_per_s=0.6e12, flop_per_s=70e12),
    "L4": Spec(bytes_per_s=0.3e12, flop_per_s=121e12),
}
"""From the makers' data sheets (SXM where there is a choice)."""
MEMORY_BOUND = ("fixed_s", "context_s")
COMPUTE_BOUND = ("prefill_s", "train_s")
SLACK = 1.25
"""No GPU reaches the same share of its figures as another: so much either way."""


def scaled(service: Service, source: str, target: str) -> tuple[Service, Service, Service]:
    """The same work on another GPU: an estimate, and the range that it is in. Steps scale with memory bandwidth,
    prefill and training with FLOP/s; what a response adds to a step is bound by one or the other, and an update by
    either."""
    for name in (source, target):
        if name not in SPECS:
            raise WindfallError(f"no published figures of {name!r}", where="--gpu, --to", fix=nearest(name, SPECS))
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
