"""How many workers are worth having, in tokens per dollar, and why. Pure: measured rates in, advice out.

A step makes and trains W tokens. The trainer's own engine makes L tokens per second for T seconds ("seeding"); then the
same machine trains at A tokens per second while the fleet, at R altogether, makes the rest. With T free to choose:

    all is made at   T + (W - (L + R) * T) / R     and `tail_s` later the last response can be trained on
    all is trained   W / A seconds after T, at the earliest
    step_s         = the least, over T, of the later of the two

The best T makes both equal: T = (W - R * (W / A - tail_s)) / (L + R), within 0 and W / (L + R). Without a tail that is
a speed of A * (L + R) / (A + L): the same gain for every worker, until the fleet alone keeps the trainer busy (R = A);
from there on, A. No worker at all: W / L + W / A, co-located training. No engine in the trainer (L = 0): T = 0.

A run that cannot train on some groups while others are made takes W / (L + R) + W / A.

A worker that is lost is replaced, and its replacement is paid for boot_s + pull_s before it makes a token. So n workers
that each make r tokens per second count as R = n * r * u, where u = 1 / (1 + (boot_s + pull_s) * losses per second).
The more workers, the fewer of a step's responses each has, and the less it makes: where a profile is known (speed.py),
r is that of its part of the responses. Price per hour: the trainer's, and every worker's.

Rules: no advice before two steps have been measured, or without prices; none to change anything for less than 3 %. Of
counts that are equally good, the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from windfall.scheduling.worker_speed import Profile

MIN_GAIN = 0.03
MIN_STEPS = 2
NOT_YET = "not enough measured yet"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunMeasurements:
    """What was measured of the run and its trainer."""

    steps: int
    """How many completed steps the figures are of."""
    tokens_per_step: float
    train_tok_per_s: float
    """Tokens of a step / seconds it trained, waits left out."""
    trainer_usd_per_h: float | None
    """None: not known."""
    local_tok_per_s: float = 0.0
    """Of the trainer's own engine; 0: it has none."""
    local_profile: Profile | None = None
    tail_s: float = 0.0
    """From the last response's end until it could be trained on."""
    responses: int = 0
    """Of a step; 0: rates are the same for any number of workers."""
    overlap: bool = True
    """Groups are trained on while others are made."""

    def __post_init__(self) -> None:
        _sound(self.tokens_per_step, self.train_tok_per_s, self.trainer_usd_per_h, self.local_tok_per_s, self.tail_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerKind:
    """One kind of worker: those of one lease, device and price."""

    name: str
    """As a person says it: "spot", "spot H200"."""
    now: int
    """How many there are."""
    tok_per_s: float
    """Of one, while it has work; its pulls count as time, its waits do not."""
    usd_per_h: float | None
    boot_s: float = 0.0
    pull_s: float = 0.0
    losses_per_h: float = 0.0
    """Of one worker."""
    profile: Profile | None = None
    slots: int = 0
    """Responses it takes at once; 0: any number."""
    most: int = 64
    """How many could be had."""

    def __post_init__(self) -> None:
        _sound(self.now, self.tok_per_s, self.usd_per_h, self.boot_s, self.pull_s, self.losses_per_h)

    def useful_tok_per_s(self, run: RunMeasurements, now: int, then: int) -> float:
        """Less the time in which its replacements start. `now` engines share the responses, and `then`, in the case
        that is looked at."""
        rate = self.tok_per_s * _thinner(self.profile, self.slots, run.responses, now, then)
        return rate / (1 + (self.boot_s + self.pull_s) * self.losses_per_h / 3600)


class ValuePoint(NamedTuple):
    workers: int
    tok_per_s: float
    tokens_per_usd: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    count: int
    """The best number of workers of this kind."""
    now: int
    why: str
    tokens_per_usd_now: float | None = None
    tokens_per_usd_best: float | None = None
    """With `count` workers."""
    curve: tuple[ValuePoint, ...] = ()
    """From 0 to a little beyond both."""


def _thinner(profile: Profile | None, slots: int, responses: int, now: int, then: int) -> float:
    """What becomes of a rate when `then` engines share the responses, not `now`."""
    if profile is None or not responses:
        return 1.0
    had, has = (min(slots or responses, max(1.0, responses / max(1, n))) for n in (now, then))
    return profile.tok_per_s(has) / profile.tok_per_s(had)


def step_s(run: RunMeasurements, fleet_tok_per_s: float) -> float:
    """How long a step takes at best.

    >>> run = RunMeasurements(steps=9, tokens_per_step=1e6, train_tok_per_s=2e4, local_tok_per_s=2e4, trainer_usd_per_h=84.0)
    >>> [round(1e6 / step_s(run, n * 4000)) for n in (0, 1, 2, 3, 4, 5, 6)]
    [10000, 12000, 14000, 16000, 18000, 20000, 20000]
    """
    w, local, fleet = run.tokens_per_step, run.local_tok_per_s, fleet_tok_per_s
    train_s = w / run.train_tok_per_s
    if local + fleet <= 0:
        return math.inf
    if not run.overlap:
        return w / (local + fleet) + run.tail_s + train_s
    seed_s = (w - fleet * (train_s - run.tail_s)) / (local + fleet) if local > 0 else 0.0
    seed_s = min(max(0.0, seed_s), w / (local + fleet))
    made_s = seed_s + max(0.0, w - (local + fleet) * seed_s) / fleet if fleet > 0 else seed_s
    return max(seed_s + train_s, made_s + run.tail_s)


def advise(run: RunMeasurements, kind: WorkerKind, others: Sequence[WorkerKind] = ()) -> Advice:
    """How many of `kind`, while `others` stay as they are.

    >>> run = RunMeasurements(steps=9, tokens_per_step=1e6, train_tok_per_s=2e4, local_tok_per_s=2e4, trainer_usd_per_h=83.79)
    >>> advise(run, WorkerKind(name="spot", now=2, tok_per_s=4000, usd_per_h=5.32)).why
    'generation is the bottleneck: 3 more pay'
    """
    silent = [k.name for k in others if k.now and k.tok_per_s <= 0]
    if run.steps < MIN_STEPS or min(run.tokens_per_step, run.train_tok_per_s, kind.tok_per_s) <= 0 or silent:
        return Advice(count=kind.now, now=kind.now, why=NOT_YET)
    base_usd_per_h, unknown = run.trainer_usd_per_h or 0.0, [] if run.trainer_usd_per_h else ["the trainer"]
    for other in (kind, *(k for k in others if k.now)):
        if other.usd_per_h is None:
            unknown.append(other.name)
        elif other is not kind:
            base_usd_per_h += other.now * other.usd_per_h
    if unknown or kind.usd_per_h is None:
        why = f"no price is known for {', '.join(unknown)}: give the lease a price"
        return Advice(count=kind.now, now=kind.now, why=why)
    engines = sum(k.now for k in (kind, *others)) + (run.local_tok_per_s > 0)
    points = []
    for n in range(max(kind.most, kind.now + 2) + 1):
        then = engines - kind.now + n
        fleet = sum(c * k.useful_tok_per_s(run, engines, then) for k, c in ((kind, n), *((k, k.now) for k in others)))
        local = run.local_tok_per_s * _thinner(run.local_profile, 0, run.responses, engines, then)
        tok_per_s = run.tokens_per_step / step_s(replace(run, local_tok_per_s=local), fleet)
        points.append(ValuePoint(n, tok_per_s, tok_per_s * 3600 / (base_usd_per_h + n * kind.usd_per_h)))
    now = points[kind.now]
    best = _best(points, kind)
    if best.tokens_per_usd < now.tokens_per_usd * (1 + MIN_GAIN):
        best = now
    return Advice(
        count=best.workers, now=kind.now, why=_why(kind, points, best, base_usd_per_h),
        tokens_per_usd_now=now.tokens_per_usd, tokens_per_usd_best=best.tokens_per_usd,
        curve=tuple(points[: max(best.workers, kind.now) + 3]),
    )  # fmt: skip


def _best(points: Sequence[ValuePoint], kind: WorkerKind) -> ValuePoint:
    """The smallest number that is as good as any; a rounding error does not make one better."""
    could = points[: max(kind.most, kind.now) + 1]
    top = max(p.tokens_per_usd for p in could)
    return next(p for p in could if p.tokens_per_usd >= top * (1 - 1e-9))


def _why(kind: WorkerKind, points: Sequence[ValuePoint], best: ValuePoint, base_usd_per_h: float) -> str:
    count, now = best.workers, kind.now
    if count > now:
        return f"generation is the bottleneck: {count - now} more {'pays' if count - now == 1 else 'pay'}"
    full = points[-1].tok_per_s * (1 - 1e-3)  # no number of workers makes the run faster than this
    enough = next(p.workers for p in points if p.tok_per_s >= full)
    below = _pays_below(points, base_usd_per_h)
    too_dear = f"not worth it: {kind.name} price too near on-demand (pays below ${below:.2f} per hour)"
    if count < now:
        if count == 0 and below > 0:
            return too_dear
        idle = "only wait" if count >= enough else "add less than they cost"
        return f"training is the bottleneck: {now - count} of {now} {idle}"
    if now >= enough or below <= 0:
        return f"training is the bottleneck: {_nth(now + 1)} worker would wait"
    if count == 0 and (kind.usd_per_h or 0.0) >= below:
        return too_dear
    if now >= kind.most:
        return f"no more than {kind.most} can be had"
    return f"as it should be: no other number gains {MIN_GAIN:.0%}"


def _pays_below(points: Sequence[ValuePoint], base_usd_per_h: float) -> float:
    """The price per hour under which some number of workers beats none by the least gain that counts."""
    need = points[0].tok_per_s * (1 + MIN_GAIN)
    return max(((p.tok_per_s / need - 1) * base_usd_per_h / p.workers if need > 0 else math.inf) for p in points[1:])


def _sound(*figures: float | None) -> None:
    assert all(f is None or (math.isfinite(f) and f >= 0) for f in figures), f"measured cannot be: {figures}"


def _nth(n: int) -> str:
    """
    >>> [_nth(n) for n in (1, 2, 3, 4, 8, 11, 22, 112)]
    ['a 1st', 'a 2nd', 'a 3rd', 'a 4th', 'an 8th', 'an 11th', 'a 22nd', 'a 112th']
    """
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    article = "an" if n in (11, 18) or str(n).startswith("8") else "a"
    return f"{article} {n}{ending}"
