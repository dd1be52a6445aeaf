"""The combined speed of several workers, computed from the profile of each. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.controller.scheduling.worker_speed import Profile


@dataclass(frozen=True, slots=True)
class FleetSpeed:
    """Workers that share responses so that their engine steps are equally long.

    >>> one = FleetSpeed.of(Profile(fixed_s=0.01, each_s=0.0001), slots=256)
    >>> round(one.tok_per_s(100)), round((one + one).tok_per_s(200)), one.tok_per_s(1000) == one.tok_per_s(256)
    (5000, 10000, True)
    >>> reads = FleetSpeed.of(Profile(fixed_s=0.01, each_s=0.0001, context_s=1e-7, context=500), slots=256)
    >>> round(reads.tok_per_s(100, 100 * 500)), round(reads.tok_per_s(100, 100 * 1500))
    (5000, 3333)
    """

    workers: tuple[tuple[Profile, int], ...] = ()
    """Each profile, with the number of workers that have it."""
    slots: float = math.inf
    """Responses that all workers together can run at once."""

    @classmethod
    def of(cls, profile: Profile, slots: float = math.inf, count: int = 1) -> FleetSpeed:
        return cls(((profile, count),), slots * count)

    @classmethod
    def constant(cls, tok_per_s: float) -> FleetSpeed:
        """The same speed for any number of responses."""
        return cls.of(Profile(fixed_s=0.0, each_s=1 / tok_per_s)) if tok_per_s > 0 else cls()

    def __add__(self, other: FleetSpeed) -> FleetSpeed:
        if not (self.workers and other.workers):
            return self if self.workers else other
        counts = dict(self.workers)
        for profile, count in other.workers:
            counts[profile] = counts.get(profile, 0) + count
        return FleetSpeed(tuple(counts.items()), self.slots + other.slots)

    def tok_per_s(self, responses: float, context: float = 0.0) -> float:
        """Tokens per second for this number of responses. `context`: total tokens in their contexts; 0: the usual
        context.

        n responses get n * slope / (n + bend); a worker adds 1 / each_s to the slope, fixed_s / each_s to the bend."""
        running = min(responses, self.slots)
        if running <= 0:
            return 0.0
        slope = bend = 0.0
        for profile, count in self.workers:
            each_s = profile.each_s
            if context and profile.context_s:
                each_s = max(each_s / 64, each_s + profile.context_s * (context / running - profile.context))
            slope += count / each_s
            bend += count * profile.fixed_s / each_s
        return running * slope / (running + bend)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """How many tokens and responses a step has, how fast they are generated, and how fast they are trained on."""

    tokens: float
    responses: float
    local: FleetSpeed
    """The trainer's own engine."""
    others: FleetSpeed
    """All other workers."""
    train_tok_per_s: float
    pull_s: float = 0.0
    """Seconds until the other workers have loaded the new weights and begin to generate."""
