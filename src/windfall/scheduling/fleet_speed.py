"""How fast workers are together, from the profile of each. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from windfall.scheduling.worker_speed import Profile


@dataclass(frozen=True, slots=True)
class FleetSpeed:
    """Workers that share responses so that all have equally long steps.

    >>> one = FleetSpeed.of(Profile(fixed_s=0.01, each_s=0.0001), room=256)
    >>> round(one.tok_per_s(100)), round((one + one).tok_per_s(200)), one.tok_per_s(1000) == one.tok_per_s(256)
    (5000, 10000, True)
    >>> reads = FleetSpeed.of(Profile(fixed_s=0.01, each_s=0.0001, context_s=1e-7, context=500), room=256)
    >>> round(reads.tok_per_s(100, 100 * 500)), round(reads.tok_per_s(100, 100 * 1500))
    (5000, 3333)
    """

    workers: tuple[tuple[Profile, int], ...] = ()
    """Profiles, and how many workers have each."""
    room: float = math.inf

    @classmethod
    def of(cls, profile: Profile, room: float = math.inf, count: int = 1) -> FleetSpeed:
        return cls(((profile, count),), room * count)

    @classmethod
    def steady(cls, tok_per_s: float) -> FleetSpeed:
        """So much of any number of responses."""
        return cls.of(Profile(fixed_s=0.0, each_s=1 / tok_per_s)) if tok_per_s > 0 else cls()

    def __add__(self, other: FleetSpeed) -> FleetSpeed:
        if not (self.workers and other.workers):
            return self if self.workers else other
        counts = dict(self.workers)
        for profile, count in other.workers:
            counts[profile] = counts.get(profile, 0) + count
        return FleetSpeed(tuple(counts.items()), self.room + other.room)

    def tok_per_s(self, responses: float, behind: float = 0.0) -> float:
        """Of so many responses, with so many tokens behind all of them; 0: as many as usual.

        n responses get n * slope / (n + bend). A worker adds 1 / each_s to the slope, fixed_s / each_s to the bend."""
        running = min(responses, self.room)
        if running <= 0:
            return 0.0
        slope = bend = 0.0
        for profile, count in self.workers:
            each_s = profile.each_s
            if behind and profile.context_s:
                each_s = max(each_s / 64, each_s + profile.context_s * (behind / running - profile.context))
            slope += count / each_s
            bend += count * profile.fixed_s / each_s
        return running * slope / (running + bend)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """Of a step: how much there is to make, who makes it, and how fast it is trained on."""

    tokens: float
    responses: float
    local: FleetSpeed
    others: FleetSpeed
    train: float
    pull_s: float = 0.0
    """Until the others begin."""
