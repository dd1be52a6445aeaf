"""How many workers are worth having, in tokens per dollar, and why. Pure: measured rates in, advice out.

A step generates W tokens and trains on them. The trainer's own engine generates L tokens per second for T seconds.
Then the same machine trains at A tokens per second while the fleet, at R tokens per second in total,
generates the rest. T can be chosen freely:

    everything is generated at   T + (W - (L + R) * T) / R
    everything is trained        W / A seconds after T, at the earliest
    step_s                     = the minimum over T of the later of the two

The best T makes both equal: T = (W - R * W / A) / (L + R), between 0 and W / (L + R). The run then has a speed of
A * (L + R) / (A + L): every worker adds the same gain until the fleet alone keeps the trainer busy (R = A); from there
on the speed is A. Without any worker a step takes W / L + W / A (co-located training). If the trainer has no engine,
L = 0 and T = 0.

If a run cannot train on some groups while others are generated, a step takes W / (L + R) + W / A.

Asynchronous training has no steps in this sense: generation never waits for the end of a step, even if a batch must be
complete before it is trained on. Its speed x is the lower of the training rate and the sum of the generation rates. The
trainer's engine generates while the trainer does not train, a share of 1 - x / A of the time:

    x = min(A, R + L * (1 - x / A)), so x = A * (L + R) / (A + L) or A, whichever is lower

A lost worker is replaced, and its replacement costs money for boot_s seconds before it generates a token. So n workers
that each generate r tokens per second count as R = n * r * u, where u = 1 / (1 + boot_s * losses per second). With more
workers, each has fewer of the step's responses and generates less: where a profile is known (worker_speed.py), r is the
rate for its share of the responses. The price per hour is that of the trainer plus that of every worker.

Rules: no advice is given before two steps have been measured, or without prices. A gain of less than 3 % is not worth a
change of the number of workers. If several numbers are equally good, the smallest is advised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from windfall.step_time import StepTime

MIN_GAIN = 0.03
MIN_STEPS = 2
NOT_YET = "not enough measurements yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """Measurements of the run and its trainer."""

    steps: int
    """Number of complete steps that were measured."""
    tokens_per_step: float
    train_tok_per_s: float
    """Tokens of a step / seconds of training, without waits."""
    trainer_usd_per_h: float | None
    """None: not known."""
    local_tok_per_s: float = 0.0
    """Tokens per second of the trainer's own engine; 0: it has none."""
    local_profile: StepTime | None = None
    responses: int = 0
    """Number of responses in a step; 0: rates do not depend on the number of workers."""
    overlap: bool = True
    """Groups are trained on while others are generated."""
    asynchronous: bool = False
    """Workers generate for later steps while the trainer trains."""

    def __post_init__(self) -> None:
        _check_finite(self.tokens_per_step, self.train_tok_per_s, self.trainer_usd_per_h, self.local_tok_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerKind:
    """Workers with the same lease terms, device and price."""

    name: str
    """A readable name, such as "spot" or "spot H200"."""
    now: int
    """Number of workers of this kind now."""
    tok_per_s: float
    """Tokens per second of one worker while it has work; pulls count as time, waits do not."""
    usd_per_h: float | None
    """Price of one worker; None: not known."""
    boot_s: float = 0.0
    """Seconds until a new worker is ready."""
    losses_per_h: float = 0.0
    """Losses per worker and hour."""
    profile: StepTime | None = None
    slots: int = 0
    """Responses that a worker can run at once; 0: any number."""
    max_count: int = 64
    """Largest number of workers that is available."""

    def __post_init__(self) -> None:
        _check_finite(self.now, self.tok_per_s, self.usd_per_h, self.boot_s, self.losses_per_h)

    def useful_tok_per_s(self, run: RunMeasurements, engines_now: int, engines: int) -> float:
        """Tokens per second of one worker, reduced by the time in which replacements boot. `engines_now` engines share
        the responses now; the rate is for `engines` that share them."""
        rate = self.tok_per_s * _batch_factor(self.profile, self.slots, run.responses, engines_now, engines)
        return rate / (1 + self.boot_s * self.losses_per_h / 3600)


class ValuePoint(NamedTuple):
    workers: int
    tok_per_s: float
    tokens_per_usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerAdvice:
    count: int
    """The best number of workers of this kind."""
    now: int
    """Number of workers of this kind now."""
    why: str
    tokens_per_usd_now: float | None = None
    tokens_per_usd_best: float | None = None
    """Tokens per dollar with `count` workers."""
    curve: tuple[ValuePoint, ...] = ()
    """From 0 workers to a few more than `count` and `now`."""


def _batch_factor(profile: StepTime | None, slots: int, responses: int, engines_now: int, engines: int) -> float:
    """The factor by which an engine's rate changes when `engines`, not `engines_now`, share the responses."""
    if profile is None or not responses:
        return 1.0
    before, after = (min(slots or responses, max(1.0, responses / max(1, n))) for n in (engines_now, engines))
    return profile.tok_per_s(after) / profile.tok_per_s(before)


def step_s(run: RunMeasurements, fleet_tok_per_s: float) -> float:
    """The shortest time of a step, in seconds.

    >>> run = RunMeasurements(
    ...     steps=9, tokens_per_step=1e6, train_tok_per_s=2e4, local_tok_per_s=2e4, trainer_usd_per_h=84.0)
    >>> [round(1e6 / step_s(run, n * 4000)) for n in (0, 1, 2, 3, 4, 5, 6)]
    [10000, 12000, 14000, 16000, 18000, 20000, 20000]
    """
    w, local, fleet = run.tokens_per_step, run.local_tok_per_s, fleet_tok_per_s
    train_s = w / run.train_tok_per_s
    if local + fleet <= 0:
        return math.inf
    if run.asynchronous:
        rate = run.train_tok_per_s
        return w / min(rate, rate * (local + fleet) / (rate + local))
    if not run.overlap:
        return w / (local + fleet) + train_s
    local_s = (w - fleet * train_s) / (local + fleet) if local > 0 else 0.0
    local_s = min(max(0.0, local_s), w / (local + fleet))
    generated_s = local_s + max(0.0, w - (local + fleet) * local_s) / fleet if fleet > 0 else local_s
    return max(local_s + train_s, generated_s)


def advise(run: RunMeasurements, kind: WorkerKind, others: Sequence[WorkerKind] = ()) -> WorkerAdvice:
    """The best number of workers of `kind` while `others` stay as they are.

    >>> run = RunMeasurements(
    ...     steps=9, tokens_per_step=1e6, train_tok_per_s=2e4, local_tok_per_s=2e4, trainer_usd_per_h=83.79)
    >>> advise(run, WorkerKind(name="spot", now=2, tok_per_s=4000, usd_per_h=5.32)).why
    'generation is the bottleneck: 3 more would pay off'
    """
    unmeasured = [k.name for k in others if k.now and k.tok_per_s <= 0]
    if run.steps < MIN_STEPS or min(run.tokens_per_step, run.train_tok_per_s, kind.tok_per_s) <= 0 or unmeasured:
        return WorkerAdvice(count=kind.now, now=kind.now, why=NOT_YET)
    base_usd_per_h, unknown = run.trainer_usd_per_h or 0.0, [] if run.trainer_usd_per_h else ["the trainer"]
    for other in (kind, *(k for k in others if k.now)):
        if other.usd_per_h is None:
            unknown.append(other.name)
        elif other is not kind:
            base_usd_per_h += other.now * other.usd_per_h
    if unknown or kind.usd_per_h is None:
        why = f"no price is known for {', '.join(unknown)}: set a price in the lease"
        return WorkerAdvice(count=kind.now, now=kind.now, why=why)
    engines_now = sum(k.now for k in (kind, *others)) + (run.local_tok_per_s > 0)
    points = []
    for n in range(max(kind.max_count, kind.now + 2) + 1):
        engines = engines_now - kind.now + n
        fleet = sum(
            c * k.useful_tok_per_s(run, engines_now, engines) for k, c in ((kind, n), *((k, k.now) for k in others))
        )
        local = run.local_tok_per_s * _batch_factor(run.local_profile, 0, run.responses, engines_now, engines)
        tok_per_s = run.tokens_per_step / step_s(replace(run, local_tok_per_s=local), fleet)
        points.append(ValuePoint(n, tok_per_s, tok_per_s * 3600 / (base_usd_per_h + n * kind.usd_per_h)))
    now = points[kind.now]
    best = _best(points, kind)
    if best.tokens_per_usd < now.tokens_per_usd * (1 + MIN_GAIN):
        best = now
    return WorkerAdvice(
        count=best.workers, now=kind.now, why=_why(kind, points, best, base_usd_per_h),
        tokens_per_usd_now=now.tokens_per_usd, tokens_per_usd_best=best.tokens_per_usd,
        curve=tuple(points[: max(best.workers, kind.now) + 3]),
    )  # fmt: skip


def _best(points: Sequence[ValuePoint], kind: WorkerKind) -> ValuePoint:
    """The smallest of the best numbers; differences within rounding are ignored."""
    possible = points[: max(kind.max_count, kind.now) + 1]
    top = max(p.tokens_per_usd for p in possible)
    return next(p for p in possible if p.tokens_per_usd >= top * (1 - 1e-9))


def _why(kind: WorkerKind, points: Sequence[ValuePoint], best: ValuePoint, base_usd_per_h: float) -> str:
    count, now = best.workers, kind.now
    if count > now:
        return f"generation is the bottleneck: {count - now} more would pay off"
    full = points[-1].tok_per_s * (1 - 1e-3)  # the highest speed with any number of workers
    enough = next(p.workers for p in points if p.tok_per_s >= full)
    below = _pays_below(points, base_usd_per_h)
    too_expensive = f"not worth it: {kind.name} price too near on-demand (pays below ${below:.2f} per hour)"
    if count < now:
        if count == 0 and below > 0:
            return too_expensive
        idle = "only wait" if count >= enough else "add less than they cost"
        return f"training is the bottleneck: {now - count} of {now} {idle}"
    if now >= enough or below <= 0:
        return f"training is the bottleneck: {_ordinal(now + 1)} worker would wait"
    if count == 0 and (kind.usd_per_h or 0.0) >= below:
        return too_expensive
    if now >= kind.max_count:
        return f"no more than {kind.max_count} are available"
    return f"no change: no other number gains {MIN_GAIN:.0%}"


def _pays_below(points: Sequence[ValuePoint], base_usd_per_h: float) -> float:
    """The price per hour below which some number of workers is better than none by MIN_GAIN."""
    need = points[0].tok_per_s * (1 + MIN_GAIN)
    return max(((p.tok_per_s / need - 1) * base_usd_per_h / p.workers if need > 0 else math.inf) for p in points[1:])


def _check_finite(*figures: float | None) -> None:
    assert all(f is None or (math.isfinite(f) and f >= 0) for f in figures), (
        f"a measurement is negative or not finite: {figures}"
    )


def _ordinal(n: int) -> str:
    """
    >>> [_ordinal(n) for n in (1, 2, 3, 4, 8, 11, 22, 112)]
    ['a 1st', 'a 2nd', 'a 3rd', 'a 4th', 'an 8th', 'an 11th', 'a 22nd', 'a 112th']
    """
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    article = "an" if n in (11, 18) or str(n).startswith("8") else "a"
    return f"{article} {n}{ending}"
