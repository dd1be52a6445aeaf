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
L = 0 and T = 0. If a run cannot train on some groups while others are generated, a step takes W / (L + R) + W / A.

Asynchronous training has no steps in this sense: generation never waits for the end of a step. Its speed x is the lower
of the training rate and the sum of the generation rates. The trainer's engine generates while the trainer does not
train, a share of 1 - x / A of the time, so x = A * (L + R) / (A + L) or A, whichever is lower.

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


@dataclass(kw_only=True, slots=True)
class RunMeasurements:
    """Measurements of the run and its trainer."""

    steps: int = 0
    """Number of complete steps that were measured."""
    tokens_per_step: float = 0.0
    train_tok_per_s: float = 0.0
    """Tokens of a step / seconds of training, without waits."""
    trainer_usd_per_h: float | None
    """None: not known."""
    local_tok_per_s: float = 0.0
    """Tokens per second of the trainer's own engines together; 0: it has none."""
    local_engines: int = 1
    """Number of engines that generate these tokens together: one per rank of the trainer."""
    local_profile: StepTime | None = None
    """The profile of one of them."""
    responses: int = 0
    """Number of responses in a step; 0: rates do not depend on the number of workers."""
    overlap: bool = True
    """Groups are trained on while others are generated."""
    asynchronous: bool = False
    """Workers generate for later steps while the trainer trains."""


@dataclass(kw_only=True, slots=True)
class WorkerKind:
    """Workers with the same lease terms, device and price."""

    name: str
    """A readable name, such as "spot" or "spot H200"."""
    now: int = 0
    """Number of workers of this kind now."""
    tok_per_s: float = 0.0
    """Tokens per second of one worker while it has work; pulls count as time, waits do not."""
    usd_per_h: float | None
    """Price of one worker; None: not known."""
    lends: bool = False
    """They are lenders: they cost nothing, and serve others first."""
    boot_s: float = 0.0
    """Seconds from the start of a worker until it is ready, including its first pull."""
    losses_per_h: float = 0.0
    """Losses per worker and hour."""
    profile: StepTime | None = None
    slots: int = 0
    """Responses that a worker can run at once; 0: any number."""
    max_count: int = 64
    """Largest number of workers that is available."""

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
    present = [k for k in others if k.now]
    measured = min(run.tokens_per_step, run.train_tok_per_s, kind.tok_per_s, *(k.tok_per_s for k in present)) > 0
    if run.steps < MIN_STEPS or not measured:
        return WorkerAdvice(count=kind.now, now=kind.now, why=NOT_YET)
    unknown = [] if run.trainer_usd_per_h else ["the trainer"]
    unknown += [k.name for k in (kind, *present) if k.usd_per_h is None]
    if unknown:
        why = f"no price is known for {', '.join(unknown)}: set a price in the lease"
        return WorkerAdvice(count=kind.now, now=kind.now, why=why)
    points = value_curve(run, kind, others)
    now, possible = points[kind.now], points[: max(kind.max_count, kind.now) + 1]
    top = max(p.tokens_per_usd for p in possible)
    best = next(p for p in possible if p.tokens_per_usd >= top * (1 - 1e-9))  # not more because of rounding
    if best.tokens_per_usd < now.tokens_per_usd * (1 + MIN_GAIN):
        best = now
    return WorkerAdvice(
        count=best.workers,
        now=kind.now,
        why=_why(kind, points, best.workers),
        tokens_per_usd_now=now.tokens_per_usd,
        tokens_per_usd_best=best.tokens_per_usd,
    )


def value_curve(run: RunMeasurements, kind: WorkerKind, others: Sequence[WorkerKind] = ()) -> list[ValuePoint]:
    """Speed and value with 0, 1, 2, ... workers of `kind`, up to more than are available or here."""
    engines_now = sum(k.now for k in (kind, *others)) + run.local_engines * (run.local_tok_per_s > 0)
    base_usd_per_h = (run.trainer_usd_per_h or 0.0) + sum(k.now * (k.usd_per_h or 0.0) for k in others)
    points = []
    for n in range(max(kind.max_count, kind.now + 2) + 1):
        engines = engines_now - kind.now + n
        fleet = n * kind.useful_tok_per_s(run, engines_now, engines)
        fleet += sum(k.now * k.useful_tok_per_s(run, engines_now, engines) for k in others)
        local = run.local_tok_per_s * _batch_factor(run.local_profile, 0, run.responses, engines_now, engines)
        tok_per_s = run.tokens_per_step / step_s(replace(run, local_tok_per_s=local), fleet)
        usd_per_h = base_usd_per_h + n * (kind.usd_per_h or 0.0)
        points.append(ValuePoint(n, tok_per_s, tok_per_s * 3600 / usd_per_h))
    return points


def _why(kind: WorkerKind, points: Sequence[ValuePoint], count: int) -> str:
    now = kind.now
    if count > now:
        return f"generation is the bottleneck: {count - now} more would pay off"
    full = points[-1].tok_per_s * (1 - 1e-3)  # the highest speed with any number of workers
    enough = next(p.workers for p in points if p.tok_per_s >= full)
    if count < now and count >= enough:
        return f"training is the bottleneck: {now - count} of {now} only wait"
    if count < now:
        return f"{now - count} of {now} add less than they cost"
    if now >= enough:
        return "training is the bottleneck: one more would only wait"
    return f"no change: no other number gains {MIN_GAIN:.0%}"
