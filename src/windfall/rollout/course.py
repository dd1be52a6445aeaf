"""How a step goes, as a function of how much of it is made: which part can be trained on, and how fast it is. Pure.

Rates alone say when a step would end if work could be split as finely as one likes. It cannot: groups become whole
late, so that little can be trained on while much is made, and the last responses are made by batches too small to be
fast, however many workers there are. Both repeat from step to step at the same share of tokens made, for any fleet:

    made, whole   of the step's tokens, the share that is made, and the share in groups that are whole
    open          of its responses, the share that is still being made
    slow          how much longer tokens take, about there, than the profiles of those who make them say

each at PARTS points, evenly spread over made + whole: half of all groups may become whole with the last few tokens.
Learned of every step, with these the end of a step can be computed for any T_seed and any fleet. Training takes groups
in the order in which they come, so it ends when the last has come and what was left by then is trained:
end = max over groups of (when it came + training of it and all after it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

PARTS = 32
TRIES = 24
LEAST, MOST = 0.25, 8.0
"""Of `slow`: more or less is a mistake in the rates."""


class Mark(NamedTuple):
    """At one moment of a step, from its start."""

    at_s: float
    made: float
    """Tokens so far."""
    whole: float
    """Of these, in groups that are whole."""
    open: float
    """Responses that are not finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crowd:
    """Workers that share responses so that all have equally long steps: n of them get n * slope / (n + bend) tokens per
    second. A worker with a profile of fixed_s and each_s adds 1 / each_s to the slope, fixed_s / each_s to the bend.

    >>> one = Crowd(slope=1 / 0.0001, bend=0.01 / 0.0001, room=256)
    >>> round(one.tok_per_s(100)), round((one + one).tok_per_s(200)), one.tok_per_s(1000) == one.tok_per_s(256)
    (5000, 10000, True)
    """

    slope: float = 0.0
    bend: float = 0.0
    room: float = math.inf

    def __add__(self, other: Crowd) -> Crowd:
        if not (self.slope and other.slope):
            return self if self.slope else other
        return Crowd(slope=self.slope + other.slope, bend=self.bend + other.bend, room=self.room + other.room)

    def times(self, factor: float) -> Crowd:
        return Crowd(slope=self.slope * factor, bend=self.bend * factor, room=self.room * factor)

    def tok_per_s(self, responses: float) -> float:
        running = min(responses, self.room)
        return running * self.slope / (running + self.bend) if running > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Of a step: how much there is to make, who makes it, and how fast it is trained on."""

    tokens: float
    responses: float
    local: Crowd
    others: Crowd
    train: float
    pull_s: float = 0.0
    """Until the others begin."""

    def crowd(self, at_s: float, seed_s: float) -> Crowd:
        """Who makes tokens then."""
        if at_s >= self.pull_s:
            return self.others if at_s >= seed_s else self.local + self.others
        return self.local if at_s < seed_s else Crowd()

    def later(self, start_s: float, tokens: float, seed_s: float, open: float) -> float:
        """When so many tokens are made from `start_s` on. Somebody makes them: at least one response is open."""
        if tokens <= 0:
            return start_s
        at_s, open, edges = start_s, max(1.0, open), sorted((self.pull_s, seed_s))
        for until_s in (*edges, math.inf) if start_s < edges[1] else (math.inf,):
            if until_s <= at_s:
                continue
            rate = self.crowd(at_s, seed_s).tok_per_s(open)
            if rate > 0 and at_s + tokens / rate <= until_s:
                return at_s + tokens / rate
            tokens -= rate * (until_s - at_s)
            at_s = until_s
        return at_s

    def made(self, start_s: float, end_s: float, seed_s: float, open: float) -> float:
        """By then, by these rates alone."""
        edges = [start_s, *(s for s in sorted({self.pull_s, seed_s}) if start_s < s < end_s), end_s]
        return sum(self.crowd(a, seed_s).tok_per_s(open) * (b - a) for a, b in pairwise(edges))


@dataclass(slots=True)
class Course:
    made: list[float] = field(default_factory=lambda: [(n + 1) / PARTS for n in range(PARTS)])
    whole: list[float] = field(default_factory=lambda: [(n + 1) / PARTS for n in range(PARTS)])
    open: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    slow: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    steps: int = 0

    def learn(self, marks: Sequence[Mark], rates: Rates, seed_s: float, weight: float) -> None:
        """`marks` in order, the last when all was made."""
        total = marks[-1].made if marks else 0.0
        if total <= 0:
            return
        weight = weight if self.steps else 1.0
        self.steps += 1
        before = Mark(0.0, 0.0, 0.0, rates.responses)
        points = _spread([before, *marks], total)
        for n, mark in enumerate(points):
            open = (before.open + mark.open) / 2
            expected = rates.made(before.at_s, mark.at_s, seed_s, open)
            new = [mark.made / total, mark.whole / total, open / rates.responses, self.slow[n]]
            if mark.made > before.made:
                new[3] = min(MOST, max(LEAST, expected / (mark.made - before.made)))
            for known, value in zip((self.made, self.whole, self.open, self.slow), new, strict=True):
                known[n] += weight * (value - known[n])
            before = mark

    def end_s(self, rates: Rates, seed_s: float) -> float:
        """When all would be trained."""
        at_s = made = trained = 0.0
        free_s = seed_s
        for n in range(PARTS):
            tokens, before_s = (self.made[n] - made) * rates.tokens * self.slow[n], at_s
            at_s = rates.later(at_s, tokens, seed_s, self.open[n] * rates.responses)
            training_s = (self.whole[n] - trained) * rates.tokens / rates.train
            comes_s = (before_s + at_s) / 2 if self.steps else before_s  # nothing learned: as if work split at will
            free_s = max(max(free_s, comes_s) + training_s, at_s)
            made, trained = self.made[n], self.whole[n]
        return free_s

    def best(self, rates: Rates) -> float:
        """The T_seed with which the step ends soonest; of equal ones the shortest."""
        low, high, found = 0.0, self.made_s(rates, math.inf), 0.0
        for _ in range(2):
            width = (high - low) / TRIES
            found = min((low + n * width for n in range(TRIES + 1)), key=lambda s: round(self.end_s(rates, s), 6))
            low, high = max(0.0, found - width), found + width
        return found

    def made_s(self, rates: Rates, seed_s: float) -> float:
        """When all would be made."""
        at_s = made = 0.0
        for n in range(PARTS):
            tokens = (self.made[n] - made) * rates.tokens * self.slow[n]
            at_s, made = rates.later(at_s, tokens, seed_s, self.open[n] * rates.responses), self.made[n]
        return at_s


def _spread(marks: Sequence[Mark], total: float) -> list[Mark]:
    """PARTS points between marks, even in made + whole, the last at the end."""
    out: list[Mark] = []
    for a, b in pairwise(marks):
        start, end = (a.made + a.whole) / total, (b.made + b.whole) / total
        while len(out) < PARTS - 1 and (wanted := 2 * (len(out) + 1) / PARTS) <= end:
            share = (wanted - start) / (end - start) if end > start else 1.0
            out.append(Mark(*(x + share * (y - x) for x, y in zip(a, b, strict=True))))
    return out + [marks[-1]] * (PARTS - len(out))
