"""How a step unfolds, as a function of how much of it is made: which part can be trained on, and how fast it is. Pure.

Rates alone say when a step would end if work could be split as finely as one likes. It cannot: groups become whole
late, so that little can be trained on while much is made, and the last responses are made by batches too small to be
fast, however many workers there are. Both repeat from step to step at the same share of tokens made, for any fleet:

    made, whole    of the step's tokens, the share that is made, and the share in groups that are whole
    open, behind   responses that are still being made, and the tokens behind them, both as shares
    slow           how much longer tokens take than the profiles of those who make them say, for so many responses with
                   so many tokens behind them

each at PARTS points, evenly spread over made + whole: half of all groups may become whole with the last few tokens.
Learned of every step, with these the end of a step can be computed for any T_seed and any fleet, from its start or from
wherever it stands. Training takes groups in the order in which they come, so it ends when the last has come and what
was left by then is trained: end = max over groups of (when it came + training of it and all after it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from windfall.rollout.speed import Profile

PARTS = 32
TRIES = 24
LEAST, MOST = 0.25, 8.0
"""Of `slow`: more or less is a mistake in the rates."""


class Mark(NamedTuple):
    """Where a step stands at one moment, from its start."""

    at_s: float
    made: float
    """Tokens so far."""
    whole: float
    """Of these, in groups that are whole."""
    open: float
    """Responses that are not finished."""
    behind: float = 0.0
    """Tokens behind these, prompts included."""


START = Mark(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Workers that share responses so that all have equally long steps.

    >>> one = Crowd.of(Profile(fixed_s=0.01, each_s=0.0001), room=256)
    >>> round(one.tok_per_s(100)), round((one + one).tok_per_s(200)), one.tok_per_s(1000) == one.tok_per_s(256)
    (5000, 10000, True)
    >>> reads = Crowd.of(Profile(fixed_s=0.01, each_s=0.0001, context_s=1e-7, context=500), room=256)
    >>> round(reads.tok_per_s(100, 100 * 500)), round(reads.tok_per_s(100, 100 * 1500))
    (5000, 3333)
    """

    workers: tuple[tuple[Profile, int], ...] = ()
    """Profiles, and how many workers have each."""
    room: float = math.inf

    @classmethod
    def of(cls, profile: Profile, room: float = math.inf, count: int = 1) -> Crowd:
        return cls(((profile, count),), room * count)

    @classmethod
    def steady(cls, tok_per_s: float) -> Crowd:
        """So much of any number of responses."""
        return cls.of(Profile(fixed_s=0.0, each_s=1 / tok_per_s)) if tok_per_s > 0 else cls()

    def __add__(self, other: Crowd) -> Crowd:
        if not (self.workers and other.workers):
            return self if self.workers else other
        counts = dict(self.workers)
        for profile, count in other.workers:
            counts[profile] = counts.get(profile, 0) + count
        return Crowd(tuple(counts.items()), self.room + other.room)

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


class Part(NamedTuple):
    """A part of what is left of a step."""

    tokens: float
    """To be made, times how much slower they come than profiles say."""
    whole: float
    """Tokens in groups that become whole with it."""
    rates: tuple[float, float, float]
    """Tokens per second of local, of the others, and of both together."""


@dataclass(slots=True)
class Course:
    made: list[float] = field(default_factory=lambda: [(n + 1) / PARTS for n in range(PARTS)])
    whole: list[float] = field(default_factory=lambda: [(n + 1) / PARTS for n in range(PARTS)])
    open: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    behind: list[float] = field(default_factory=lambda: [0.0] * PARTS)
    slow: list[float] = field(default_factory=lambda: [1.0] * PARTS)
    steps: int = 0

    def learn(
        self, marks: Sequence[Mark], there: Sequence[tuple[float, Crowd]], responses: float, weight: float
    ) -> None:
        """`marks` in order, the last when all was made; `there`: who made tokens, each from a time on, in order."""
        total = marks[-1].made if marks else 0.0
        if total <= 0:
            return
        weight = weight if self.steps else 1.0
        self.steps += 1
        before = START._replace(open=responses)
        for n, mark in enumerate(_spread([before, *marks], total)):
            slow, open, behind = self.slow[n], (before.open + mark.open) / 2, (before.behind + mark.behind) / 2
            if mark.made > before.made:
                expected = _expected(there, before.at_s, mark.at_s, open, behind)
                slow = min(MOST, max(LEAST, expected / (mark.made - before.made)))
            new = (mark.made / total, mark.whole / total, open / responses, behind / total, slow)
            for known, value in zip((self.made, self.whole, self.open, self.behind, self.slow), new, strict=True):
                known[n] += weight * (value - known[n])
            before = mark

    def total(self, rates: Rates, start: Mark) -> float:
        """How many tokens this step comes to. Responses tell: when so few are left open, so much is usually made. The
        more of them are finished, the more that counts beside what steps before came to."""
        open = start.open / rates.responses
        if not self.steps or not start.made or open >= 1:
            return rates.tokens
        before = (1.0, 0.0)  # open, made
        for n in range(PARTS):
            point = (self.open[n], (self.made[n] + (self.made[n - 1] if n else 0.0)) / 2)
            if point[0] <= open:
                break
            before = point
        else:
            point = (0.0, 1.0)
        share = (before[0] - open) / (before[0] - point[0]) if before[0] > point[0] else 1.0
        usual = before[1] + min(1.0, share) * (point[1] - before[1])
        return max(start.made, open * rates.tokens + (1 - open) * start.made / max(1e-9, usual))

    def left(self, rates: Rates, start: Mark) -> list[Part]:
        """What is still to be made. If fewer or more groups are whole by now than usual, the rest catches up evenly."""
        total = self.total(rates, start)
        made, out = min(1.0, start.made / total), list[Part]()
        before, usual, share = 0.0, 0.0, 1.0
        both = rates.local + rates.others
        for n in range(PARTS):
            if made > self.made[n] and n < PARTS - 1:
                before, usual = self.made[n], self.whole[n]
                continue
            if not out:
                passed = max(0.0, made - before) / max(1e-9, self.made[n] - before)
                usual += min(1.0, passed) * (self.whole[n] - usual)
                share = (1 - min(1.0, start.whole / total)) / max(1e-9, 1 - usual)
                before = max(before, made)
            tokens = max(0.0, self.made[n] - before) * total * self.slow[n]
            open, behind = max(1.0, self.open[n] * rates.responses), self.behind[n] * total
            speeds = [crowd.tok_per_s(open, behind) for crowd in (rates.local, rates.others, both)]
            out.append(Part(tokens, (self.whole[n] - usual) * share * total, (speeds[0], speeds[1], speeds[2])))
            before, usual = self.made[n], self.whole[n]
        return out

    def end_s(self, rates: Rates, seed_s: float, start: Mark = START) -> float:
        """When all would be trained."""
        return self._end_s(self.left(rates, start), rates, seed_s, start)

    def _end_s(self, left: Sequence[Part], rates: Rates, seed_s: float, start: Mark) -> float:
        at_s, free_s = start.at_s, seed_s + start.whole / rates.train
        for part in left:
            before_s, at_s = at_s, _later(at_s, part, rates.pull_s, seed_s)
            comes_s = (before_s + at_s) / 2 if self.steps else before_s  # nothing learned: as if work split at will
            free_s = max(max(free_s, comes_s) + part.whole / rates.train, at_s)
        return free_s

    def best(self, rates: Rates, start: Mark = START) -> float:
        """The T_seed with which the step ends soonest; of equal ones the shortest."""
        left = self.left(rates, start)
        low, high, found = start.at_s, _made_s(left, rates, math.inf, start.at_s), start.at_s
        for _ in range(2):
            width = (high - low) / TRIES
            tries = (low + n * width for n in range(TRIES + 1))
            found = min(tries, key=lambda s: round(self._end_s(left, rates, s, start), 6))
            low, high = max(start.at_s, found - width), found + width
        return found

    def made_s(self, rates: Rates, seed_s: float, start: Mark = START) -> float:
        """When all would be made."""
        return _made_s(self.left(rates, start), rates, seed_s, start.at_s)


def _made_s(left: Sequence[Part], rates: Rates, seed_s: float, at_s: float) -> float:
    for part in left:
        at_s = _later(at_s, part, rates.pull_s, seed_s)
    return at_s


def _later(at_s: float, part: Part, pull_s: float, seed_s: float) -> float:
    """When a part that is begun at `at_s` is made: by local until `seed_s`, by the others from `pull_s` on."""
    tokens, (local, others, both) = part.tokens, part.rates
    while tokens > 0:
        here, there = at_s < seed_s, at_s >= pull_s
        rate = (both if here else others) if there else local if here else 0.0
        until_s = min(seed_s if here else math.inf, math.inf if there else pull_s)
        if math.isinf(until_s) or tokens <= rate * (until_s - at_s):
            return at_s + tokens / rate if rate > 0 else math.inf
        tokens -= rate * (until_s - at_s)
        at_s = until_s
    return at_s


def _expected(there: Sequence[tuple[float, Crowd]], start_s: float, end_s: float, open: float, behind: float) -> float:
    """Tokens that should have been made in this time, by the profiles of those who were there."""
    tokens = 0.0
    for n, (since_s, crowd) in enumerate(there):
        until_s = there[n + 1][0] if n + 1 < len(there) else math.inf
        if since_s < end_s and until_s > start_s:
            tokens += crowd.tok_per_s(open, behind) * (min(until_s, end_s) - max(since_s, start_s))
    return tokens


def _spread(marks: Sequence[Mark], total: float) -> list[Mark]:
    """PARTS points between marks, even in made + whole, the last at the end."""
    out: list[Mark] = []
    for a, b in pairwise(marks):
        start, end = (a.made + a.whole) / total, (b.made + b.whole) / total
        while len(out) < PARTS - 1 and (wanted := 2 * (len(out) + 1) / PARTS) <= end:
            share = (wanted - start) / (end - start) if end > start else 1.0
            out.append(Mark(*(x + share * (y - x) for x, y in zip(a, b, strict=True))))
    return out + [marks[-1]] * (PARTS - len(out))
